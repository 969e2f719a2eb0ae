"""``tieredmoe pack``: make, restore and verify expert packs, describe any model, plan a machine."""

from __future__ import annotations

import typer

from tieredmoe.cli.pack_create import create, restore, rollback
from tieredmoe.cli.pack_drives import attach, mirror, split
from tieredmoe.cli.pack_inspect import inspect
from tieredmoe.cli.pack_plan import plan
from tieredmoe.cli.pack_preflight import check
from tieredmoe.cli.pack_verify import verify

app = typer.Typer(
    help="Make, check and place expert packs; describe a model; plan a machine for it.",
    no_args_is_help=True,
)

for command in (inspect, plan, check, create, verify, restore, rollback, split, mirror, attach):
    app.command()(command)
