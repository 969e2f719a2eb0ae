"""Models of real dimensions: few layers, real record sizes, weights that mean nothing."""

from tieredmoe.testing.synthetic.model import SyntheticModel, make_synthetic
from tieredmoe.testing.synthetic.published import ModelName
from tieredmoe.testing.synthetic.routing import RoutingStatistics, text_like_tokens

__all__ = [
    "ModelName",
    "RoutingStatistics",
    "SyntheticModel",
    "make_synthetic",
    "text_like_tokens",
]
