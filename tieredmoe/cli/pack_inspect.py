"""``tieredmoe pack inspect``: what a model on disk is, for people and for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from rich.filesize import decimal

from tieredmoe.cli.columns import in_columns
from tieredmoe.cli.wording import counted
from tieredmoe.errors import TieredMoEError, UnsupportedModelError
from tieredmoe.pack import Inspection, inspect_model, open_checkpoint
from tieredmoe.pack.inspection import layer_ranges, type_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieredmoe.pack import Checkpoint


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="A pack's directory, or a GGUF: a file, any of its shards, or their folder.",
            metavar="MODEL",
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model on disk holds: layers, types, sizes, slots per GiB, and what is unusual.

    Reads headers only, so it takes a second for a model of any size.
    """
    model = open_checkpoint(path)
    found = inspect_model(model)
    running = list(_running(model))
    if as_json:
        typer.echo(json.dumps(plain(found) | {"running": running}, indent=2))
        return
    rows = [*_rows(found), *(("to run it", fact) for fact in running)]
    for line in in_columns(rows, left=(0, 1)):
        typer.echo(line)


def plain(value: Any) -> Any:
    """``value`` as JSON has it: paths as texts, sequences as lists, data as objects."""
    if attrs.has(type(value)):
        return {
            field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))
        }
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value


def _running(model: Checkpoint) -> Iterator[str]:
    """What keeps this release from running the model, or makes it slow."""
    # Torch takes seconds to import, and commands that copy bytes do without.
    from tieredmoe.adapters.registry import adapter_for  # noqa: PLC0415
    from tieredmoe.moe.dequant import check_type, unpacked_by_host  # noqa: PLC0415

    try:
        adapter_for(model.metadata).check(model)
    except TieredMoEError as error:
        yield str(error)
    layouts = model.spec.layouts.values()
    for ggml_type in sorted({role.ggml_type for layout in layouts for role in layout.roles}):
        try:
            if unpacked_by_host(ggml_type):
                check_type(ggml_type)
                name = type_name(ggml_type)
                yield f"experts of type {name} are unpacked by the host, slowly: no kernel has it"
        except UnsupportedModelError as error:
            yield str(error)


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    name = f" ({found.name})" if found.name else ""
    yield "model", f"{found.architecture}{name}, {counted(found.n_layers, 'layer')}"
    n_routed = len(found.routed_layers)
    routed = f"{counted(n_routed, 'layer')} ({layer_ranges(found.routed_layers)})"
    yield "routed", f"{routed} of {counted(found.n_experts, 'expert')}, top-{found.top_k}"
    yield "token", f"{counted(found.token_experts, 'expert')}, {decimal(found.token_nbytes)}"
    yield "form", _form(found)
    yield "experts", _experts(found)
    yield "dense", f"{decimal(found.dense_nbytes)}{_types(found, 'dense')}"
    yield (
        "slot",
        f"{found.slot_nbytes:,} bytes hold any expert, {found.slots_per_gib:.1f} slots per GiB",
    )
    if found.read_nbytes != found.slot_nbytes:
        yield "reads", f"{found.read_nbytes:,} bytes hold what is read for any expert"
    for each in found.layers:
        types = ", ".join(f"{role.name} {role.type}" for role in each.roles)
        gate = each.roles[0]
        yield (
            f"layers {layer_ranges(each.layers)}",
            f"{types}; gate {gate.rows}×{gate.columns}, {each.payload_nbytes:,} bytes an expert",
        )
    if found.digests:
        yield "digests", f"{found.digests} per expert and role"
    else:
        yield "digests", "none; a pack has them (`tieredmoe pack create`)"
    for title, digest in (
        ("source digest", found.source_digest),
        ("config digest", found.config_digest),
    ):
        if digest is not None:
            yield title, digest
    yield from (("unusual", fact) for fact in found.unusual)
    yield from (("left out", fact) for fact in found.left_out)


def _form(found: Inspection) -> str:
    nbytes = sum(file.nbytes for file in found.files)
    where = f"{found.form}, {decimal(nbytes)} in {counted(len(found.files), 'file')}"
    if found.form == "gguf":
        where += ", run in place"
    if found.form == "split pack":
        where += f", split over {', '.join(map(str, found.drives))}"
    if found.form == "mirrored pack":
        where += f", a copy each in {', '.join(map(str, found.drives))}"
    return where


def _experts(found: Inspection) -> str:
    of_what = "of what is read for them is others' bytes" if found.form == "gguf" else "is padding"
    padding = f", {found.padding_share:.1%} {of_what}" if found.padding_share else ""
    return f"{decimal(found.experts_nbytes)}{_types(found, 'experts')}{padding}"


def _types(found: Inspection, part: str) -> str:
    types = found.types_nbytes[part]
    if not types:
        return ""
    return " (" + ", ".join(f"{name} {decimal(nbytes)}" for name, nbytes in types.items()) + ")"
