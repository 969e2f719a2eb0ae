"""GGUF files: headers, sets of shards, tolerant metadata, routed experts."""

from tieredmoe.gguf.experts import ExpertTensors, Slab, find_experts, predicting_layers
from tieredmoe.gguf.header import GGUFHeader, parse_header, read_header
from tieredmoe.gguf.inventory import GGUFInventory, ShardInfo, merge_headers, open_inventory
from tieredmoe.gguf.metadata import Metadata, MetadataReader
from tieredmoe.gguf.tensors import TensorInfo, TensorSource

__all__ = [
    "ExpertTensors",
    "GGUFHeader",
    "GGUFInventory",
    "Metadata",
    "MetadataReader",
    "ShardInfo",
    "Slab",
    "TensorInfo",
    "TensorSource",
    "find_experts",
    "merge_headers",
    "open_inventory",
    "parse_header",
    "predicting_layers",
    "read_header",
]
