"""The high-level API: a pack in, text out; limits, stops and cancellation."""

import asyncio
import json
import mmap
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tieredmoe import (
    BudgetError,
    ClosedError,
    ConfigError,
    HierarchyConfig,
    Message,
    MetadataError,
    PackError,
    PromptTooLongError,
    TokenizerError,
    UnsupportedModelError,
    check_model,
    create_pack,
    open_inventory,
    open_model,
    open_pack,
)
from tieredmoe.adapters import dense_memory
from tieredmoe.pack import progress, tensors
from tieredmoe.testing.tiny_gguf import make_deepseek_v4

SMALL = HierarchyConfig(vram="1GiB", reserve=0)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Packs of one tiny model: with a tokenizer, without, and of an unknown architecture."""
    folder = tmp_path_factory.mktemp("packs")
    made = {
        "text": {},
        "ids": {"tokenizer": None},
        "foreign": {
            "metadata": {
                "general.architecture": "mystery",
                "mystery.block_count": 6,
                "mystery.expert_count": 8,
                "mystery.expert_used_count": 3,
            }
        },
    }
    for name, options in made.items():
        weights = make_deepseek_v4(folder / f"{name}.gguf", seed=2, **options)
        asyncio.run(create_pack(weights.paths[0], folder / f"{name}.pack"))
    return folder


def generate(pack, prompt, config=SMALL, **settings):
    """The generation of a whole run, ended."""

    async def main():
        async with await open_model(pack, config) as model:
            generation = model.generate(prompt, **settings)
            pieces = [piece async for piece in generation]
            model.hierarchy.check()
            return generation, pieces

    return asyncio.run(main())


def test_text_goes_in_and_comes_out_in_whole_characters(packs):
    generation, pieces = generate(packs / "text.pack", "Hello there", max_new_tokens=12)
    assert 0 < len(generation.token_ids) <= 12
    assert [piece.token_id for piece in pieces if piece.token_id is not None] == [
        token for token in generation.token_ids if token != 1
    ]
    assert "".join(map(str, pieces)) == "".join(piece.text for piece in pieces)


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(packs):
    settings = {"max_new_tokens": 16, "temperature": 1.5}
    first, again, other = (
        generate(packs / "ids.pack", [5, 6, 7], seed=seed, **settings)[0].token_ids
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_greedy_tokens_do_not_depend_on_the_cache_or_the_chunks(packs):
    prompt = list(range(3, 60))
    small = HierarchyConfig(vram=3 * 16384 + 100, reserve=0, stage_slots=1, policy="lru")
    runs = [
        generate(packs / "ids.pack", prompt, config, max_new_tokens=10, chunk_length=chunk)[0]
        for config, chunk in ((SMALL, 512), (small, 512), (SMALL, 13))
    ]
    assert runs[0].token_ids == runs[1].token_ids == runs[2].token_ids
    assert runs[1].report.decode.cache_evictions > 0


def test_a_report_counts_tokens_and_what_they_cost(packs):
    generation, _ = generate(packs / "ids.pack", [3] * 20, max_new_tokens=5, chunk_length=8)
    report = generation.report
    assert (report.n_prompt_tokens, report.n_prefilled, report.n_generated) == (20, 20, 5)
    assert report.stop_reason == "max_new_tokens"
    executed = {
        layer: report.prefill.executed_experts[layer] + report.decode.executed_experts[layer]
        for layer in report.prefill.executed_experts
    }
    assert set(executed.values()) == {(20 + 4) * 3}
    assert report.prefill.pack_reads > 0
    assert report.prefill_tokens_per_s > 0
    assert report.decode_tokens_per_s > 0


def test_generation_stops_when_the_context_is_full(packs):
    generation, _ = generate(packs / "ids.pack", [3] * 6, max_new_tokens=50, n_context=10)
    assert generation.report.stop_reason == "context"
    assert len(generation.token_ids) == 4


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(packs):
    async def main():
        async with await open_model(packs / "ids.pack", SMALL) as model:
            full = [piece.token_id async for piece in model.generate([3, 4], max_new_tokens=6)]
            generation = model.generate([3, 4], max_new_tokens=6)
            generation._stop_ids = frozenset({full[2]})
            cut = [piece.token_id async for piece in generation]
            return full, cut, generation.report.stop_reason

    full, cut, reason = asyncio.run(main())
    assert cut == full[: full.index(full[2])]
    assert reason == "stop token"


@pytest.fixture(scope="module")
def ids_model(packs):
    """A model that takes token ids only, open; ``generate`` on it is a plain call."""
    with asyncio.Runner() as runner:
        model = runner.run(open_model(packs / "ids.pack", SMALL))
        yield model
        runner.run(model.close())


def test_a_prompt_longer_than_the_context_names_the_setting_and_how_far_it_goes(ids_model):
    limit = ids_model.model.config.context_length
    with pytest.raises(
        PromptTooLongError,
        match=f"20 tokens does not fit a context of 20; raise n_context .*up to {limit}",
    ):
        ids_model.generate([3] * 20, n_context=20)


@pytest.mark.parametrize("n_context", [None, 20])
def test_a_prompt_longer_than_the_model_allows_is_not_told_to_raise_anything(ids_model, n_context):
    limit = ids_model.model.config.context_length
    with pytest.raises(PromptTooLongError, match=f"the model's own limit is {limit}") as caught:
        ids_model.generate([3] * limit, n_context=n_context)
    assert "raise" not in str(caught.value)


def test_every_wrong_setting_is_told_in_one_error_sampling_included(ids_model):
    with pytest.raises(ConfigError) as caught:
        ids_model.generate(
            [5], max_new_tokens=0, chunk_length=0, temperature=-1, top_p=9, seed=-1, n_context=1
        )
    names = ("max_new_tokens", "chunk_length", "n_context", "temperature", "top_p", "seed")
    assert [part.split(" is ")[0] for part in str(caught.value).split(": ")[1].split("; ")] == [
        *names
    ]


@pytest.mark.parametrize("name", ["max_new_tokens", "chunk_length", "n_context", "seed"])
@pytest.mark.parametrize("value", ["8", 8.0, True, [8], torch.tensor(True), torch.tensor([8, 9])])
def test_a_count_that_is_no_integer_is_refused(ids_model, name, value):
    with pytest.raises(ConfigError, match=f"{name} is ") as caught:
        ids_model.generate([5], **{name: value})
    assert "\n" not in str(caught.value)


def test_integers_of_any_library_are_taken_as_settings(packs):
    eight = {"max_new_tokens": np.int64(8), "n_context": torch.tensor(9), "seed": np.uint8(8)}
    generation, _ = generate(
        packs / "ids.pack", [5], chunk_length=np.int16(8), temperature=np.float32(1), **eight
    )
    same, _ = generate(packs / "ids.pack", [5], max_new_tokens=8, seed=8, temperature=1.0)
    assert generation.token_ids == same.token_ids


def _prompt_ids(pack, prompt):
    async def main():
        async with await open_model(pack, SMALL) as model:
            return model.generate(prompt)._prompt

    return asyncio.run(main())


@pytest.mark.parametrize(
    "ids",
    [
        (3, 4),
        range(3, 5),
        np.array([3, 4]),
        [np.int64(3), np.uint8(4)],
        torch.tensor([3, 4]),
        [torch.tensor(3), 4],
    ],
)
def test_ids_come_in_any_sequence_of_integers(ids_model, ids):
    assert ids_model.generate(ids)._prompt == [3, 4]


@pytest.mark.parametrize(
    "prompt",
    [
        Message("user", "Hello"),
        [Message("user", "Hello")],
        {"role": "user", "content": "Hello"},
        [{"role": "user", "content": "Hello"}],
        ({"content": "Hello", "role": "user", "reasoning": None},),
    ],
)
def test_a_conversation_comes_as_messages_or_as_mappings(packs, prompt):
    assert _prompt_ids(packs / "text.pack", prompt) == _prompt_ids(packs / "text.pack", "Hello")


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        (b"Hello", "got bytes"),
        (memoryview(b"Hello"), "got memoryview"),
        (None, "got NoneType"),
        (5, "got int"),
        (torch.tensor(5), "got Tensor"),
        ({3, 4}, "got set"),
        ((i for i in (3, 4)), "got generator"),
        ([3, 4.0], "item 1 is float 4.0"),
        ([3, True], "item 1 is bool True"),
        (["Hello"], "item 0 is str 'Hello'"),
        ([[3, 4]], r"item 0 is list \[3, 4\]"),
        (np.array([3.5]), "item 0 is float 3.5"),
        (torch.tensor([[3, 4]]), "item 0 is list"),
        (torch.tensor([True]), "item 0 is bool True"),
        ([Message("user", "x"), 3], "item 1 is int 3 among messages, not both"),
        ([3, {"role": "user", "content": "x"}], "item 1 is dict .* among token ids, not both"),
        (Message("user", 5), "content is int 5, not text"),
        ([Message("user", None)], "content is NoneType None, not text"),
        (Message("assistant", "x", 5), "reasoning is int 5, not text"),
        ({"role": "user", "content": [{"type": "text"}]}, "content is list .*, not text"),
        ({"role": None, "content": "x"}, "role is NoneType None, not text"),
        ({"input_ids": [3], "role": "user"}, "no 'input_ids', there is no 'content'"),
        ([{"role": "user", "content": "x", 5: 1}], "a message has no 5"),
    ],
)
def test_a_prompt_of_another_kind_is_refused_by_what_it_is(ids_model, prompt, got):
    with pytest.raises(ConfigError, match=rf"{got}.*accepted: text, .*token ids") as caught:
        ids_model.generate(prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("beyond", [-1, 0, 2**70])
def test_ids_outside_the_vocabulary_are_refused_before_anything_runs(ids_model, beyond):
    n_vocab = ids_model.model.config.vocab_size
    wrong = -1 if beyond < 0 else n_vocab + beyond
    with pytest.raises(
        TokenizerError, match=f"id {wrong} is outside the .*vocabulary of {n_vocab}"
    ):
        ids_model.generate([0, n_vocab - 1, wrong])


def test_a_second_iteration_of_a_generation_is_refused_and_changes_nothing(packs):
    async def main():
        async with await open_model(packs / "ids.pack", SMALL) as model:
            generation = model.generate([3, 4], max_new_tokens=3)
            async for _ in generation:
                pass
            before = generation.report
            with pytest.raises(ConfigError, match=r"iterated once; call generate\(\) again"):
                await anext(aiter(generation))
            return before, generation.report

    before, after = asyncio.run(main())
    assert before == after


@pytest.mark.parametrize(
    ("prompt", "settings", "error", "fact"),
    [
        ([3], {"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0"),
        ([3], {"chunk_length": 0, "n_context": 1}, ConfigError, "chunk_length.*n_context"),
        ([3], {"temperature": -1.0}, ConfigError, "temperature"),
        ([], {}, ConfigError, "no tokens"),
        ([3, Message("user", "x")], {}, ConfigError, "not both"),
        ("text", {}, TokenizerError, "give token ids"),
        ([100000], {}, TokenizerError, "100000"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_one_line(packs, prompt, settings, error, fact):
    with pytest.raises(error, match=fact) as caught:
        generate(packs / "ids.pack", prompt, **settings)
    assert "\n" not in str(caught.value)


def test_cancellation_ends_a_generation_cleanly_with_partial_statistics(packs, tmp_path):
    config = HierarchyConfig(vram="1GiB", reserve=0, stats_path=tmp_path / "s.json")

    async def main():
        async with await open_model(packs / "ids.pack", config) as model:
            generation = model.generate([3] * 5, max_new_tokens=1000)

            async def consume():
                async for _ in generation:
                    if len(generation.token_ids) == 3:
                        task.cancel()

            task = asyncio.ensure_future(consume())
            with pytest.raises(asyncio.CancelledError):
                await task
            model.hierarchy.check()
            return generation.report

    report = asyncio.run(main())
    assert report.stop_reason == "unfinished"
    assert report.n_generated >= 3
    assert json.loads((tmp_path / "s.json").read_text())["cache_hits"] > 0


def test_two_generations_side_by_side_do_not_disturb_each_other(packs):
    async def main():
        config = HierarchyConfig(vram=4 * 16384, reserve=0, stage_slots=2)
        async with await open_model(packs / "ids.pack", config) as model:

            async def tokens(prompt):
                return [p.token_id async for p in model.generate(prompt, max_new_tokens=6)]

            alone = [await tokens([4, 5]), await tokens([9] * 9)]
            together = await asyncio.gather(tokens([4, 5]), tokens([9] * 9))
            return alone, together

    alone, together = asyncio.run(main())
    assert alone == together


def test_a_budget_below_top_k_is_refused_with_the_numbers(packs):
    config = HierarchyConfig(vram="20KiB", reserve=0)
    with pytest.raises(BudgetError, match=r"20.0 KiB|20480"):
        asyncio.run(open_model(packs / "ids.pack", config))


@pytest.mark.parametrize("stage_slots", [0, 1, 8])
def test_a_gguf_runs_as_it_is_and_says_what_its_pack_says(packs, stage_slots):
    config = HierarchyConfig(vram=3 * 40960, reserve=0, stage_slots=stage_slots)
    prompt = list(range(3, 40))
    packed, _ = generate(packs / "ids.pack", prompt, max_new_tokens=8)
    in_place, _ = generate(packs / "ids.gguf", prompt, config, max_new_tokens=8)
    assert in_place.token_ids == packed.token_ids
    assert in_place.report.decode.pack_read_bytes > in_place.report.decode.pack_payload_bytes


def test_what_is_open_already_can_be_given(packs):
    expected = generate(packs / "ids.pack", [3, 4], max_new_tokens=4)[0].token_ids
    for source in (open_inventory(packs / "ids.gguf"), open_pack(packs / "ids.pack")):
        assert generate(source, [3, 4], max_new_tokens=4)[0].token_ids == expected


def test_a_model_in_no_form_that_is_known_says_so(tmp_path):
    with pytest.raises(PackError, match=r"is not a pack.*it is empty"):
        asyncio.run(open_model(tmp_path, SMALL))


def test_digests_asked_of_a_gguf_are_refused(packs):
    config = HierarchyConfig(vram="1GiB", reserve=0, verify="always")
    with pytest.raises(ConfigError, match=r"verify='always'.*ids.gguf carries no digests"):
        asyncio.run(open_model(packs / "ids.gguf", config))


def test_all_that_a_gguf_lacks_is_told_in_one_error(tmp_path):
    dropped = ["deepseek4.expert_used_count", "deepseek4.attention.q_lora_rank"]
    make_deepseek_v4(tmp_path / "m.gguf", drop_keys=dropped)
    for run in (lambda path: asyncio.run(open_model(path, SMALL)), check_model):
        with pytest.raises(MetadataError) as caught:
            run(tmp_path / "m.gguf")
        assert all(key in str(caught.value) for key in dropped)


def test_a_check_takes_whatever_opening_takes(packs):
    for source in ("ids.gguf", "ids.pack"):
        check_model(packs / source, SMALL)
    check_model(open_inventory(packs / "ids.gguf"), SMALL)
    with pytest.raises(BudgetError):
        check_model(packs / "ids.gguf", HierarchyConfig(vram="20KiB", reserve=0))


@pytest.mark.parametrize("name", ["ids.gguf", "ids.pack"])
def test_progress_grows_to_the_dense_weights_and_loading_time_is_told(packs, name):
    steps = []

    async def main():
        model = await open_model(packs / name, SMALL, progress=lambda *step: steps.append(step))
        async with model:
            return model.load_s

    assert asyncio.run(main()) > 0
    done = [n_done for n_done, _ in steps]
    (total,) = {n_total for _, n_total in steps}
    assert done == sorted(done)
    assert done[-1] == total
    pack = open_pack(packs / "ids.pack")
    experts = {name for name in pack.tensors if "_exps" in name}
    assert total == sum(pack.tensors[name].nbytes for name in pack.tensors.keys() - experts)


def test_cancelling_a_load_stops_it_and_leaves_nothing_open(packs, monkeypatch):
    """Progress is reported in the loop, so its first report is the moment to cancel in."""
    monkeypatch.setattr(tensors, "PIECE_NBYTES", 4096)
    monkeypatch.setattr(progress, "PROGRESS_INTERVAL_S", 0.0)
    before = n_open()
    seen = []

    async def main():
        def cancel(n_done, n_total):
            seen.append((n_done, n_total))
            task.cancel()

        task = asyncio.ensure_future(open_model(packs / "ids.gguf", SMALL, progress=cancel))
        await asyncio.wait({task})
        return task.cancelled(), n_open()

    cancelled, during = asyncio.run(main())
    assert cancelled
    assert seen[-1][0] < seen[-1][1]
    assert n_open() == before
    assert during[1] <= before[1] + 2, "no reading thread is left"


def test_memory_refused_for_the_dense_weights_is_a_budget_error(packs, monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    before = n_open()
    refusing = SimpleNamespace(**{**vars(mmap), "mmap": refuse})
    monkeypatch.setattr(dense_memory, "mmap", refusing)
    with pytest.raises(BudgetError, match=r"refused .* for the dense weights .*ulimit"):
        asyncio.run(open_model(packs / "ids.pack", SMALL))
    assert n_open() == before


def test_a_closed_model_still_says_what_it_did_and_says_that_it_is_closed(packs):
    async def main():
        model = await open_model(packs / "ids.pack", SMALL)
        async with model:
            generation = model.generate([3, 4], max_new_tokens=3)
            async for _ in generation:
                pass
            assert "deepseek4 on the host" in repr(model)
        await model.close()
        return model, generation

    model, generation = asyncio.run(main())
    assert generation.report.n_generated == 3
    assert model.stats().cache_misses > 0
    assert "deepseek4" in repr(model)
    with pytest.raises(ClosedError, match="was closed"):
        model.generate([3, 4])


def test_prompts_go_in_chunks_of_what_the_model_was_opened_for(packs):
    async def main():
        async with await open_model(packs / "ids.pack", SMALL, chunk_length=8) as model:
            real, lengths = model.model.forward, []

            async def forward(tokens, *args, **kwargs):
                lengths.append(len(tokens))
                return await real(tokens, *args, **kwargs)

            model.model.forward = forward
            async for _ in model.generate([3] * 20, max_new_tokens=1):
                pass
            return lengths

    assert asyncio.run(main()) == [8, 8, 4]


def n_open():
    """Open files and threads."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def test_an_unknown_architecture_is_named_with_those_supported(packs):
    with pytest.raises(UnsupportedModelError, match=r"'mystery'.*deepseek4"):
        asyncio.run(open_model(packs / "foreign.pack", SMALL))
