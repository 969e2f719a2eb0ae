"""Predictors: which experts a layer will probably be routed to, before it is."""

from tieredmoe.prefetch.governor import Governor
from tieredmoe.prefetch.hash_table import HashTable
from tieredmoe.prefetch.markov import MarkovPredictor
from tieredmoe.prefetch.prefetcher import Prefetcher
from tieredmoe.prefetch.protocol import Predictor

__all__ = ["Governor", "HashTable", "MarkovPredictor", "Predictor", "Prefetcher"]
