"""Expert packs of other systems, read in place: both formats of SGLang's."""

from tieredmoe.pack.foreign.opening import is_foreign_pack, open_foreign_pack
from tieredmoe.pack.foreign.pack import ForeignPack
from tieredmoe.pack.foreign.repair import SourceRepair, open_foreign_repair
from tieredmoe.pack.foreign.verify import verify_foreign_pack

__all__ = [
    "ForeignPack",
    "SourceRepair",
    "is_foreign_pack",
    "open_foreign_pack",
    "open_foreign_repair",
    "verify_foreign_pack",
]
