"""Expert packs: a model's experts as aligned records, and everything else it was made from."""

from tieredmoe.pack.layout import Extent
from tieredmoe.pack.manifest import Manifest
from tieredmoe.pack.progress import PackProgress
from tieredmoe.pack.reader import Pack, open_pack
from tieredmoe.pack.repair import GGUFRepair, open_repair
from tieredmoe.pack.source import PackSource
from tieredmoe.pack.threads import VerifyThreads
from tieredmoe.pack.verified import VerifiedSource
from tieredmoe.pack.verify import Damage, VerifyReport, verify_pack
from tieredmoe.pack.writer import ConversionReport, create_pack

__all__ = [
    "ConversionReport",
    "Damage",
    "Extent",
    "GGUFRepair",
    "Manifest",
    "Pack",
    "PackProgress",
    "PackSource",
    "VerifiedSource",
    "VerifyReport",
    "VerifyThreads",
    "create_pack",
    "open_pack",
    "open_repair",
    "verify_pack",
]
