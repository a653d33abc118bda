"""A model that is cut by styles trains as it did: logits, raw gradients, norm and weights are the plain one's."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import re
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalite import comm, parallelize
from megalite.mesh import Axis, Layout, Mesh
from megalite.spec import param_specs
from tests.ranks import run
from tests.styles.models import (
    ENCODER,
    GPT2,
    GPT2_ATTRIBUTES,
    GPT2_SEQUENCE,
    LLAMA,
    LLAMA_SEQUENCE,
    RECIPES,
    gpt2,
    llama,
    torch_encoder,
)
from tests.styles.training import (
    MAX_NORM,
    Record,
    assert_equals_the_plain_model,
    global_batch,
    reference,
    run_model,
    train,
)


@functools.cache
def plain(name: str) -> Record:
    return reference(RECIPES[name])


@pytest.mark.parametrize(
    ("name", "layout", "stage"),
    [
        *((name, Layout(tp=2), 0) for name in RECIPES),
        *((name, Layout(tp=4), 0) for name in RECIPES if "Llama" not in name and "Qwen" not in name),
        *((name, Layout(tp=4), 0) for name in ("Llama of 4 key heads", "Llama of 4 key heads, sequence")),
        *((name, Layout(dp=2, tp=2), 0) for name in ("Llama", "Llama, sequence", "GPT-2", "GPT-2, sequence")),
        *((name, Layout(dp=2, tp=2), 3) for name in ("Llama", "Llama, sequence", "GPT-2", "GPT-2, sequence")),
        ("Llama recomputed, sequence", Layout(dp=2, tp=2), 3),
    ],
)
def test_a_model_that_is_cut_by_styles_trains_as_it_did(name, layout, stage):
    records = run(train, layout.world_size, RECIPES[name], layout, {"stage": stage})
    assert_equals_the_plain_model(records, plain(name), layout.dp)
    assert min(plain(name).norms) > MAX_NORM, "each step must clip, or clipping is not tested"


@pytest.mark.parametrize("name", ["Llama, sequence", "GPT-2, sequence"])
def test_microbatches_change_nothing_at_stage_3(name):
    records = run(train, 4, RECIPES[name], Layout(dp=2, tp=2), {"stage": 3}, 2)
    assert_equals_the_plain_model(records, plain(name), 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torchs_own_encoder_trains_under_zero_as_it_is(stage):
    records = run(train, 2, ENCODER, Layout(dp=2), {"stage": stage})
    assert_equals_the_plain_model(records, reference(ENCODER), 2)


@pytest.mark.parametrize("name", RECIPES)
def test_over_an_axis_of_one_rank_every_number_keeps_its_bits(name):
    """And, since the styles are checked all the same, a mistake in them shows without ranks."""
    recipe = RECIPES[name]
    whole = recipe.build()
    cut = parallelize(recipe.build(), recipe.styles, Mesh.build(), attributes=recipe.attributes)
    assert [type(module) for module in cut.modules()] == [type(module) for module in whole.modules()]
    outcomes = []
    for model in (whole, cut):
        output, loss = run_model(model, *global_batch(0), recipe)
        loss.backward()
        outcomes.append({"logits": output, **{path: p.grad for path, p in model.named_parameters()}})
    for path, value in outcomes[0].items():
        assert torch.equal(value, outcomes[1][path]), path


class Calls(comm.Observer):
    def __init__(self) -> None:
        self.by_operation: Counter[str] = Counter()

    def issued(self, call: comm.Call) -> None:
        self.by_operation[call.operation] += 1


def counted(name: str) -> tuple[Counter[str], Counter[str]]:
    """Collectives of one forward and of one backward."""
    recipe, calls = RECIPES[name], (Calls(), Calls())
    model = parallelize(recipe.build(), recipe.styles, Mesh.build(Layout(tp=2)), attributes=recipe.attributes)
    with comm.observe(calls[0]):
        _, loss = run_model(model, *global_batch(0), recipe)
    with comm.observe(calls[1]):
        loss.backward()
    return calls[0].by_operation, calls[1].by_operation


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # embedding, and per layer the row of each sublayer; back a column each: q, k, v, gate, up and the head
        ("Llama", {"all_reduce": 1 + 2 * 2, "all_gather": 1}, {"all_reduce": 2 * 5 + 1}),
        ("Llama, one copy", {"all_reduce": 1 + 2 * 2, "all_gather": 1}, {"all_reduce": 2 * 2 + 1}),
        # the head gathers its input and its logits; back its input again, and what split_seq had cut
        (
            "Llama, sequence",
            {"all_reduce": 1, "all_gather": 2 * 2 + 2, "reduce_scatter": 2 * 2},
            {"all_gather": 2 * 2 + 2, "reduce_scatter": 2 * 2 + 1},
        ),
    ],
)
def test_the_columns_within_a_module_share_what_brings_their_input_in(name, forward, backward):
    for counts in run(counted, 2, name):
        assert counts == (forward, backward)


def one_rank(name: str) -> tuple[nn.Module, nn.Module]:
    """The plain model, and the first of two ranks of the one that is cut; nothing of it may communicate."""
    recipe, mesh = RECIPES[name], SimpleNamespace(tp=Axis("tp", 2, 0))
    return recipe.build(), parallelize(recipe.build(), recipe.styles, mesh, attributes=recipe.attributes)


@pytest.mark.parametrize("name", RECIPES)
def test_logical_names_shapes_and_decay_are_those_of_the_plain_model(name):
    """So a checkpoint is the same for every tp: what a rank holds is a region of the user's own parameter."""
    plain_model, cut = one_rank(name)
    expected = {path: (spec.shape, spec.decay) for path, spec in param_specs(plain_model).items()}
    found = {spec.logical(path)[0]: (spec.logical(path)[1], spec.decay) for path, spec in param_specs(cut).items()}
    assert found == expected


@pytest.mark.parametrize("name", RECIPES)
def test_the_vocabulary_and_norms_are_no_matrices_for_an_optimizer_that_sees_these(name):
    _, cut = one_rank(name)
    matrices = {path for path, spec in param_specs(cut).items() if spec.matrices is not None and len(spec.shape) > 1}
    words = ("embed", "wte", "lm_head", "norm", "ln_")
    assert matrices and not [path for path in matrices if any(word in path for word in words)]


def test_ties_buffers_modes_dtypes_and_frozen_weights_are_kept():
    model = gpt2().to(torch.bfloat16).eval()
    model.transformer.h[0].attn.c_attn.weight.requires_grad_(False)
    llama_model = llama()
    buffers = {path: buffer for path, buffer in llama_model.named_buffers()}
    mesh = SimpleNamespace(tp=Axis("tp", 2, 0))
    parallelize(model, GPT2, mesh, attributes=GPT2_ATTRIBUTES)
    parallelize(llama_model, LLAMA, mesh)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(module.training for module in model.modules())
    frozen = [path for path, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == [f"transformer.h.0.attn.c_attn.weight_{chunk}" for chunk in range(3)]
    assert all(buffer is buffers[path] for path, buffer in llama_model.named_buffers())


def test_the_whole_weights_are_given_back():
    model = gpt2()
    wholes = [weakref.ref(p) for path, p in model.named_parameters() if p.ndim > 1 and "wpe" not in path]
    parallelize(model, GPT2, SimpleNamespace(tp=Axis("tp", 2, 0)), attributes=GPT2_ATTRIBUTES)
    gc.collect()
    assert not any(whole() is not None for whole in wholes)


def state(model: nn.Module) -> dict[str, Any]:
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    types = [type(module) for module in model.modules()]
    sizes = [model.transformer.h[0].attn.num_heads, model.transformer.h[0].attn.split_size]
    return {"hooks": hooks, "types": types, "sizes": sizes, "names": list(model.state_dict())}


ATTENTION = "transformer.h.0.attn"


@pytest.mark.parametrize(
    ("change", "attributes", "tp", "message"),
    [
        ({"*.c_atn": "column:3"}, {}, 2, r"'\*.c_atn' matches no module; near it are .*c_attn"),
        ({"*.c_attn": "columns"}, {}, 2, r"'columns' of pattern '\*.c_attn' is unknown; take one of column:N, column"),
        ({"*.c_fc": "row:2"}, {}, 2, "'row:2'.* is unknown"),
        ({"*.c_attn": "column:0"}, {}, 2, "'column:0'.* is unknown"),
        ({"*c_proj": "column"}, {}, 2, r"c_proj has two styles: row, pattern '\*.attn.c_proj', and column, pattern"),
        ({"*.ln_1": "row"}, {}, 2, r"ln_1 \(row, pattern '\*.ln_1'\): a LayerNorm is no plain nn.Linear"),
        ({"*.act": "norm"}, {}, 2, "a NewGELUActivation is no layer norm"),
        ({"*.attn": "embedding"}, {}, 2, "a GPT2Attention is no plain nn.Embedding"),
        ({}, {}, 3, "32 outputs of each of 3 chunks cannot be cut over tp=3: take a tp that divides 32"),
        ({"*.c_attn": "column:5"}, {}, 2, "its 96 outputs are no 5 equal chunks"),
        ({}, {}, 8, "c_attn.*32 outputs are 4 heads of head_dim=8, which cannot be cut over tp=8"),
        ({}, {"*.attn": "num_head"}, 2, f"{ATTENTION}.num_head .* is None and must be a whole number"),
        ({}, {"*.attn": ["num_heads", "scale_attn_weights"]}, 2, "scale_attn_weights .* is True and must be a whole"),
        ({}, {"*.mlp": "act"}, 2, "mlp.act .* must be a whole number"),
        ({}, {"*.c_attn": "nf"}, 2, "c_attn.nf .*: the style of .* sees to its sizes"),
        ({}, {"*.attention": "num_heads"}, 2, "'.*attention' matches no module"),
        ({"lm_head": None}, {}, 2, r"transformer.wte \(embedding.*\) and lm_head share one parameter, weight"),
        ({"lm_head": "row"}, {}, 2, "transformer.wte .* and lm_head .* share one parameter, weight"),
        ({"*.attn": "gather_seq"}, {}, 2, "attn .*: no module before it, in order of registration, has .* split_seq"),
        ({"transformer.ln_f": "join_seq"}, {}, 2, "ln_f .*: no module before it"),
        ({"transformer.h.*": "split_seq"}, {}, 2, "two styles|is cut here already"),
        ({"transformer.h.[01]": "split_seq"}, {}, 2, "ln_1 has parameters and no style, and stands where the sequence"),
        ({"*.attn": "copy", "transformer.h.0": "copy"}, {}, 2, "lies within transformer.h.0|ln_1 has parameters and"),
        (
            {"transformer.h.0": "split_seq", "*.ln_[12]": "norm", "*.attn": "copy"},
            {},
            2,
            "attn .*: the sequence is",
        ),
        ({"transformer.h.0": "split_seq", "*.ln_[12]": "norm"}, {}, 2, "transformer.ln_f has parameters and no style"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_changed(change, attributes, tp, message):
    model = gpt2()
    before = state(model)
    styles = {pattern: style for pattern, style in (GPT2 | change).items() if style is not None}
    with pytest.raises(ValueError, match=message) as refused:
        parallelize(model, styles, SimpleNamespace(tp=Axis("tp", tp, 0)), attributes=GPT2_ATTRIBUTES | attributes)
    assert "\n" not in str(refused.value)
    assert state(model) == before


def test_two_key_heads_over_four_ranks_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"k_proj .*16 outputs are 2 heads of head_dim=8, .* over tp=4"):
        parallelize(llama(), LLAMA, SimpleNamespace(tp=Axis("tp", 4, 0)))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("pattern", "style"),
    [
        ("*.self_attn.out_proj", "row"),
        ("*.linear1", "column"),
        ("*.self_attn", "copy"),
        ("encoder.layers.0", "split_seq"),
        ("*.norm1", "norm"),
    ],
)
def test_torchs_attention_and_encoder_layers_are_refused_by_name(pattern, style, tp):
    with pytest.raises(ValueError, match=r"(MultiheadAttention|TransformerEncoderLayer) reads its parts' weights"):
        parallelize(torch_encoder(), {pattern: style}, SimpleNamespace(tp=Axis("tp", tp, 0)))


@pytest.mark.parametrize(
    ("module", "style", "message"),
    [
        (nn.Embedding(8, 4, max_norm=1.0), "embedding", "max_norm=1.0 is not kept"),
        (nn.Embedding(8, 4, sparse=True), "embedding", "sparse=True is not kept"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "column", "is no plain nn.Linear|would be lost"),
        (nn.BatchNorm1d(4), "norm", "a BatchNorm1d is no layer norm or RMS norm"),
        (nn.Conv1d(4, 4, 1), "column", "a Conv1d is no plain nn.Linear"),
    ],
)
def test_a_module_that_would_lose_something_is_refused(module, style, message):
    with pytest.raises(ValueError, match=message):
        parallelize(nn.Sequential(module), {"0": style}, SimpleNamespace(tp=Axis("tp", 2, 0)))


def test_hooks_go_along_with_their_handles():
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    handle = model[0].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    parallelize(model, {"0": "column"}, SimpleNamespace(tp=Axis("tp", 2, 0)))
    with torch.no_grad():
        model(torch.zeros(3, 4))
        handle.remove()
        model(torch.zeros(3, 4))
    assert seen == [(3, 2)]


def norms(program: str) -> list[tuple[int, float]]:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(dist, "init_process_group", lambda backend: None)
        exec(program, {})
    return [(int(step), float(norm)) for step, norm in (line.split() for line in out.getvalue().splitlines())]


def test_the_program_of_the_page_trains_on_four_ranks():
    page = Path(__file__).parents[2] / "docs" / "parallelize.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    first, *others = run(norms, 4, program)
    assert all(other == first for other in others)
    assert [step for step, _ in first] == list(range(10))
    assert all(0 < norm < 10 for _, norm in first)


def test_the_styles_of_the_page_are_those_that_are_tested():
    page = (Path(__file__).parents[2] / "docs" / "parallelize.md").read_text()
    (recipes,) = re.findall(r"```\n(Llama .*?)```", page, flags=re.DOTALL)
    llama_recipe, gpt2_recipe = recipes.split("GPT-2")
    assert dict(re.findall(r"'(\S+)': '(\S+)'", llama_recipe)) == LLAMA_SEQUENCE
    assert dict(re.findall(r"'(\S+)': '(\S+)'", gpt2_recipe)) == GPT2_SEQUENCE
