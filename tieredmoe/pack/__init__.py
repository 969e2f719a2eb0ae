"""Models on disk: packs, GGUF files run in place, and where their experts and tensors lie."""

from tieredmoe.pack.attach import attach_drives
from tieredmoe.pack.drive_speed import measure_drive
from tieredmoe.pack.drive_verify import verify_drives
from tieredmoe.pack.drives import DrivesPack, has_drives, open_drives
from tieredmoe.pack.foreign import ForeignPack, open_foreign_pack, verify_foreign_pack
from tieredmoe.pack.inspection import Inspection, inspect_model
from tieredmoe.pack.layout import Extent
from tieredmoe.pack.manifest import Manifest
from tieredmoe.pack.mirror import mirror_pack
from tieredmoe.pack.opening import open_checkpoint
from tieredmoe.pack.preflight import Preflight, check_conversion
from tieredmoe.pack.progress import PackProgress
from tieredmoe.pack.reader import Pack, open_pack
from tieredmoe.pack.records import (
    Checkpoint,
    Digested,
    Envelope,
    Extents,
    Records,
    spec_as_read,
)
from tieredmoe.pack.repair import GGUFRepair, open_repair
from tieredmoe.pack.restore import RestoreReport, restore_pack
from tieredmoe.pack.rollback import RollbackReport, rollback_pack
from tieredmoe.pack.source import PackSource
from tieredmoe.pack.split import split_pack
from tieredmoe.pack.threads import VerifyThreads
from tieredmoe.pack.verified import VerifiedSource
from tieredmoe.pack.verify import Damage, VerifyReport, verify_pack
from tieredmoe.pack.virtual import VirtualPack, open_virtual_pack
from tieredmoe.pack.writer import ConversionReport, create_pack

__all__ = [
    "Checkpoint",
    "ConversionReport",
    "Damage",
    "Digested",
    "DrivesPack",
    "Envelope",
    "Extent",
    "Extents",
    "ForeignPack",
    "GGUFRepair",
    "Inspection",
    "Manifest",
    "Pack",
    "PackProgress",
    "PackSource",
    "Preflight",
    "Records",
    "RestoreReport",
    "RollbackReport",
    "VerifiedSource",
    "VerifyReport",
    "VerifyThreads",
    "VirtualPack",
    "attach_drives",
    "check_conversion",
    "create_pack",
    "has_drives",
    "inspect_model",
    "measure_drive",
    "mirror_pack",
    "open_checkpoint",
    "open_drives",
    "open_foreign_pack",
    "open_pack",
    "open_repair",
    "open_virtual_pack",
    "restore_pack",
    "rollback_pack",
    "spec_as_read",
    "split_pack",
    "verify_drives",
    "verify_foreign_pack",
    "verify_pack",
]
