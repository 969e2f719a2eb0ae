"""Predictors: which experts a layer will probably be routed to, before it is."""

from tieredmoe.prefetch.markov import MarkovPredictor
from tieredmoe.prefetch.protocol import Predictor

__all__ = ["MarkovPredictor", "Predictor"]
