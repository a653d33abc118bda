"""What is about to run, in lines: the model, who sits where, tokens, memory, bytes, operations; before any is spent."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megalite.cost.flops import peak_tflops
from megalite.data import Baselines
from megalite.mesh import Layout
from megalite.models.config import GPTConfig
from megalite.pipeline.catalogue import SCHEDULES
from megalite.pipeline.simulate import Costs, peaks, simulate
from megalite.train.config import Config, LinkConfig
from megalite.train.expect import Memory, expected_of_all, most_sent, operations_per_token
from megalite.train.placement import placement
from megalite.train.spans import Span, micro_batch, microbatches, spans_of

SHOWN = 4
"""Groups of ranks along an axis, ranks of a group, and spans of steps, that are written out."""


class Peak(NamedTuple):
    """What one rank's device could do. source: where the number comes from, or why there is none."""

    tflops: float | None
    source: str


def peak_of(config: Config, device: str) -> Peak:
    """cluster.peak_tflops if given, else what is known of the GPU at the precision in use."""
    if config.cluster.peak_tflops is not None:
        return Peak(config.cluster.peak_tflops, "cluster.peak_tflops")
    if device == "cpu":
        return Peak(None, "n/a on the CPU; cluster.peak_tflops sets a peak")
    import torch  # here: what a header says of a CPU needs none

    name, precision = torch.cuda.get_device_name(device), config.precision.compute
    known = peak_tflops(name, precision, tf32=torch.backends.cuda.matmul.allow_tf32)
    if known is None:
        return Peak(None, f"n/a: the peak of a {name} is not known here; cluster.peak_tflops sets it")
    return Peak(known, f"{name}, {precision}, dense")


def header_lines(
    config: Config,
    layout: Layout,
    *,
    where: str,
    data: str,
    baselines: Baselines | None,
    peak: Peak,
    available: int | None,
    device: str = "cpu",
) -> list[str]:
    """The header of a run. available: bytes that one rank can have, None if that is not known."""
    span = spans_of(config)[0]
    needs = expected_of_all(config, on_cpu=device == "cpu")
    most = max(needs, key=lambda need: need.total)
    parts = {
        "model": describe_model(config),
        "layout": "\n".join(describe_layout(config, layout)),
        "where": where,
        "link": describe_link(config.link),
        "batch": "\n".join(describe_batches(config)),
        "data": data,
        "to beat": describe_baselines(baselines),
        "pipeline": "\n".join(describe_pipeline(config, needs)),
        "memory": "\n".join([describe_memory(needs[0], available), *describe_neediest(needs)]),
        "sends": describe_sent(most_sent(config, span), alike=config.layout.pp == 1),
        "mfu": describe_peak(operations_per_token(config, span), peak),
        "output": config.out_dir,
    }
    lines = [
        f"{name if place == 0 else '':<8} {line}"
        for name, text in parts.items()
        for place, line in enumerate(text.splitlines())
    ]
    return lines + [warning for warning in (pipeline_warning(config), memory_warning(most, available)) if warning]


def describe_model(config: Config) -> str:
    model = config.model
    shape = f"{model.num_hidden_layers} layers, hidden {model.hidden_size}"
    if isinstance(model, GPTConfig):
        shape += f", {model.num_attention_heads} heads, vocabulary {model.vocab_size}"
    return f"{model.model_type}: {shape}; {model.parameter_count():,} parameters in {config.precision.compute}"


def describe_layout(config: Config, layout: Layout) -> list[str]:
    """The sizes, then a table with a row for each axis of several ranks: which ranks sit together on it."""
    sizes = " x ".join(f"{name}={layout.sizes[name]}" for name in ("dp", "cp", "tp", "pp"))
    sequence = ", sequence parallel" if config.layout.sequence_parallel else ""
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    lines = [f"{sizes} = {ranks}{sequence}; ZeRO stage {config.zero.stage}"]
    rows = [name for name in ("tp", "cp", "dp", "pp") if layout.sizes[name] > 1]
    if rows:
        lines.append("axis  ranks  who sits together")
    for name in rows:
        size = layout.sizes[name]
        shown = " ".join(_group(group) for group in _first_groups(layout, name))
        groups = layout.world_size // size
        more = f" and {groups - SHOWN} more" if groups > SHOWN else ""
        lines.append(f"{name:<4}  {size:>5}  {shown}{more}")
    return lines


def describe_link(link: LinkConfig) -> str:
    """Empty where the network is what it is."""
    if link.axis is None:
        return ""
    return f"{link.axis} is slowed down to {link.bandwidth_gb_per_sec:g} GB/s and {link.latency_ms:g} ms"


def describe_batches(config: Config) -> list[str]:
    """The batch of the first step, then a line for each change of it, and of what is read."""
    spans = spans_of(config)
    lines = [describe_batch(config, spans[0])]
    for before, span in itertools.pairwise(spans):
        same = (before.seq_len, before.global_batch_size) == (span.seq_len, span.global_batch_size)
        what = "as before, of the next of data.phases" if same else describe_batch(config, span)
        lines.append(f"from step {span.first_step}: {what}")
    hidden = len(lines) - SHOWN
    return lines if hidden <= 1 else [*lines[: SHOWN - 1], f"and {hidden} more changes", lines[-1]]


def describe_batch(config: Config, span: Span) -> str:
    assert config.layout.dp is not None, "check() fills it in"
    micro = micro_batch(config, span.global_batch_size)
    each = f"{config.layout.dp} data ranks x {microbatches(config, span)} micro-batches x {micro}"
    if not span.has_sequences:
        return f"{span.global_batch_size} vectors a step: {each}"
    of = f"{span.global_batch_size} sequences x {span.seq_len} = {span.tokens_per_step:,} tokens a step"
    return f"{of}: {each} sequences"


def describe_baselines(baselines: Baselines | None) -> str:
    if baselines is None:
        return ""
    text = f"guessing by the frequencies of tokens: {baselines.unigram_nats:.4f} nats"
    if baselines.bigram_nats is None:
        return text
    return f"{text}, by the token before: {baselines.bigram_nats:.4f}"


def describe_pipeline(config: Config, needs: Sequence[Memory]) -> list[str]:
    """The schedule, the stages, and what is to be expected of them; nothing for one stage whose backward is whole.
    needs: of each rank of pp."""
    stages, count = placement(config), microbatches(config, spans_of(config)[0])
    schedule, layers = stages.schedule(count), [len(part.layers) for part in stages.parts]
    if len(layers) == 1 and not schedule.splits_backward:
        return []
    ends = config.pipeline.embedding_layers, config.pipeline.head_layers
    costs = [size + (stage == 0) * ends[0] for stage, size in enumerate(layers)]
    costs[-1] += ends[1]
    times = simulate(schedule, Costs(stages={stage: (cost, cost, cost) for stage, cost in enumerate(costs)}))
    held = peaks(schedule)
    lines = [
        f"{schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks, layers {_few(layers)}; {count} "
        "micro-batches",
        f"by layers at F=B=W, messages taking no time: bubble {float(times.bubble):.1%} of the ranks' time; rank "
        f"by rank activations of {_few([f'{float(size):.3g}' for size in held])} micro-batches at most",
    ]
    if waiting := max(need.deferred for need in needs):
        text = f"the backward is split: up to {size_text(waiting)} a rank wait from B to W"
        if config.recompute == "full":
            text += ", which recompute=full does not make less; pipeline.schedule=1f1b and interleaved hold none"
        lines.append(text)
    return lines


def pipeline_warning(config: Config) -> str:
    """One line if a step has fewer micro-batches than the schedule is shaped for; else empty."""
    name, fewest = config.pipeline.schedule, min(microbatches(config, span) for span in spans_of(config))
    wanted = SCHEDULES[name].whole_from(config.layout.pp) if name in SCHEDULES else 1
    if fewest >= wanted:
        return ""
    return (
        f"warning: pipeline.schedule={name} over layout.pp={config.layout.pp} has its small bubble from {wanted} "
        f"micro-batches a step on, and there are {fewest}; take a smaller micro_batch_size or a larger "
        "global_batch_size"
    )


def _few(values: Sequence[object]) -> str:
    """All of them, or of many the ends."""
    shown = [str(value) for value in values]
    return " ".join(shown if len(shown) <= 4 * SHOWN else [*shown[: 2 * SHOWN], "...", *shown[-SHOWN:]])


def describe_memory(need: Memory, available: int | None) -> str:
    """What is expected at the highest moment of a step: by kind what is exact, then the rest."""
    state, peak = need.state, need.peak
    exact = {name: getattr(state, name) for name in ("weights", "masters", "gradients", "moments")}
    held = ", ".join(f"{name} {size_text(size)}" for name, size in exact.items() if size)
    of = "" if available is None else f" of {size_text(available)}"
    paper = f" (by arXiv:2205.05198 {size_text(need.published)})" if need.published else ""
    several = need.in_flight != need.kept
    each, flight = (" a micro-batch", f", in flight {size_text(need.in_flight)}") if several else ("", "")
    host = f"; in the CPU's memory {size_text(state.host)}" if state.host else ""
    return (
        f"{size_text(need.total)}{of} a rank expected, at the step's highest moment ({peak.name}): {held}; "
        f"activations kept {size_text(need.kept)}{each}{paper}{flight}{host}"
    )


def describe_neediest(needs: Sequence[Memory]) -> list[str]:
    """The rank of pp that needs most, if that is not the first."""
    rank, most = max(enumerate(needs), key=lambda pair: pair[1].total)
    return [f"most on rank {rank} of pp: {size_text(most.total)} ({most.peak.name})"] if rank else []


def describe_measured(need: Memory, found: Mapping[str, int]) -> list[str]:
    """What one rank was seen to hold, beside what was expected. found: as `megalite.train.memory_measure` gives it."""
    expected = {name: getattr(need.state, name) for name in ("weights", "masters", "gradients", "moments", "host")}
    exact = [f"{name} {_beside(found[name], size)}" for name, size in expected.items() if size or found.get(name)]
    lines = [f"{'memory':<8} measured on rank 0: {', '.join(exact)}"]
    activations = [f"activations kept {_beside(found['kept'], need.kept)}"] if "kept" in found else []
    if "peak" in found:
        activations.append(f"highest moment of a step {_beside(found['peak'], need.total)}")
    return lines + [f"{'':<8} {', '.join(activations)}"] * bool(activations)


def _beside(measured: int, expected: int) -> str:
    if measured == expected:
        return f"{size_text(measured)} (as expected)"
    off = f"{measured / expected - 1:+.1%}" if expected else "none"
    return f"{size_text(measured)} (expected {size_text(expected)}: {off})"


def memory_warning(need: Memory, available: int | None) -> str:
    """One line if more is expected than there is, with what would help; else empty."""
    if available is None or need.total <= available:
        return ""
    if need.state.between > available:
        way_out = "take zero.stage=3 over more data ranks, a larger layout.tp or layout.pp, or a smaller model"
    else:
        way_out = "take a smaller micro_batch_size or seq_len, recompute=full, or loss.chunk_tokens"
    return (
        f"warning: a rank is expected to need {size_text(need.total)} and can have {size_text(available)}: it will "
        f"run out of memory; {way_out}"
    )


def describe_sent(sent: dict[str, float], *, alike: bool = True) -> str:
    """alike: whether all ranks send as much."""
    if not sent:
        return "nothing: one rank"
    what = " a step and rank" + ("" if alike else ", where it is most")
    return ", ".join(f"{axis} {size_text(size)}" for axis, size in sent.items()) + what


def describe_peak(operations: float, peak: Peak) -> str:
    """operations: of one token, forward and backward."""
    cost = f"{operations_text(operations)} a token (6 N + 12 heads head_dim keys, causal: megalite/cost/flops.py)"
    if peak.tflops is None:
        return f"{peak.source}; {cost}"
    return f"{cost} over {peak.tflops:g} TFLOPS a rank ({peak.source})"


def operations_text(operations: float) -> str:
    """For people, to three digits: 2.95e6 -> 2.95 MFLOP."""
    return _scaled(operations, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"), step=1000)


def size_text(size: float) -> str:
    """Bytes for people, to three digits: 1536 -> 1.5 KiB."""
    return _scaled(size, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), step=1024)


def _scaled(value: float, units: Sequence[str], *, step: int) -> str:
    """To three digits in the first unit that takes no more; each is `step` times the one before."""
    place = 0
    while value >= 1000 and place + 1 < len(units):
        value, place = value / step, place + 1
    return f"{value:.3g} {units[place]}"


def _first_groups(layout: Layout, name: str) -> list[tuple[int, ...]]:
    """The first groups of an axis: few are asked for, since each takes a walk over the world."""
    groups: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for rank in range(layout.world_size):
        if len(groups) == SHOWN:
            break
        if rank not in seen:
            groups.append(layout.ranks((name,), rank))
            seen.update(groups[-1])
    return groups


def _group(ranks: Sequence[int]) -> str:
    """[0, 1, 2], and of a long one its ends."""
    if len(ranks) <= 2 * SHOWN:
        return str(list(ranks))
    return "[" + ", ".join(str(rank) for rank in ranks[:SHOWN]) + f", ... {ranks[-1]}]"
