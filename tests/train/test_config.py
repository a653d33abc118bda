"""The configuration: defaults stand in one place, types are exact, and what cannot be is refused before torch."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
import yaml

from megalite.layers.recompute import OPS
from megalite.models.config import GPTConfig, MLPConfig
from megalite.train.check import RECOMPUTED, check
from megalite.train.config import Config, LayoutConfig, load
from megalite.train.strict import flatten
from tests.train.composing import CONFIGS, choosing, composed

PRESETS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))

GROUPS = sorted(path for path in CONFIGS.glob("*/*.yaml") if path.parent.name not in ("hydra", "model"))

# Parameters as published: the models' papers and cards, to the digits that are given there.
PUBLISHED = {
    "gpt2": 124.4e6,
    "llama2-7b": 6.738e9,
    "llama3-8b": 8.030e9,
    "llama3-70b": 70.554e9,
    "llama3-405b": 405.853e9,
    "llama3.1-8b": 8.030e9,
    "llama3.2-1b": 1.236e9,
    "qwen2-0.5b": 494.0e6,
    "qwen2-7b": 7.616e9,
    "qwen3-0.6b": 596.0e6,
    "qwen3-8b": 8.191e9,
    "olmo-7b": 6.888e9,
    "olmo2-7b": 7.299e9,
    "yi-6b": 6.061e9,
    "yi-34b": 34.389e9,
    "deepseek-llm-7b": 6.910e9,
    "deepseek-llm-67b": 67.425e9,
    "llama-0.5b": 0.501e9,
}


def test_what_hydra_composes_is_the_schema_and_nothing_else():
    assert load(composed()) == Config()
    assert load(composed(model="mlp")) == Config(model=MLPConfig(), global_batch_size=128)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_no_yaml_repeats_a_default(path):
    """A default that is written twice is changed once."""
    values = yaml.safe_load(path.read_text())
    defaults = dict(flatten(asdict(Config())))
    group = path.parent.name
    if group != "configs" and "@package _global_" not in path.read_text():
        values = {group: values or {}}
    for key, value in flatten({key: value for key, value in values.items() if key not in ("defaults", "hydra")}):
        assert key.endswith("defaults") or path.parent.parent.name == "hydra" or defaults[key] != value, key


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_legal_model_of_the_published_size(preset):
    config = check(load(composed(model=preset)), 1)
    if preset in PUBLISHED:
        digits = 5e-4  # what is published has four digits or more, or three and a zero that is right
        assert config.model.parameter_count() == pytest.approx(PUBLISHED[preset], rel=digits)
    else:
        assert preset in ("gpt-tiny", "mlp")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+model.extra=1", "model.extra is no key of the configuration; model has attention_bias, "),
        ("+optim.lrr=1", "optim.lrr is no key of the configuration; did you mean optim.lr?"),
        ("+model.rope_scaling.facto=2", "did you mean model.rope_scaling.factor?"),
        ("~optim.lr", "optim.lr is missing; give it a value"),
        ("steps=true", "steps=true must be a whole number"),
        ("steps=1.5", "steps=1.5 must be a whole number"),
        ("steps=1e3", "steps=1000.0 must be a whole number; write 1000"),
        ("layout.tp=two", "layout.tp=two must be a whole number, and is the string 'two'"),
        ("optim.lr='1e-3'", "optim.lr=1e-3 must be a finite number, and is the string '1e-3'"),
        ("optim.lr=nan", "optim.lr=nan must be a finite number"),
        ("optim.lr=null", "optim.lr=null must be a finite number"),
        ("optim.lr=true", "optim.lr=true must be a finite number"),
        ("verify=1", "verify=1 must be true or false"),
        ("out_dir=true", "out_dir=true must be a string"),
        ("data.paths=a.txt", "data.paths=a.txt must be a list, such as data.paths=[...]"),
        ("optim.betas=[0.9,x]", "optim.betas[1]=x must be a finite number"),
        ("optim=3", "optim=3 is a group of keys; set optim.name"),
        ("optim.name=adam", "optim.name=adam is unknown; take one of adamw, sgd"),
        ("recompute=yes", "recompute=yes is unknown; take one of none, selective, full"),
        ("precision.compute=int8", "precision.compute=int8 is unknown; take one of fp32, bf16, fp16, fp64"),
        ("data.phases=[{from_step:2}]", "data.phases[0].paths is missing; give it a value"),
        ("data.phases=[{from_step:2,path:[a]}]", "data.phases[0].path is no key of the configuration; did you mean "),
        ("data.phases=[{from_step:x,paths:[a]}]", "data.phases[0].from_step=x must be a whole number"),
        ("seq_len_ramp=[10,64]", "seq_len_ramp[0]=10 must be a list"),
        ("global_batch_size_ramp=[[10,true]]", "global_batch_size_ramp[0][1]=true must be a whole number"),
        ("model.hidden_act=swish", "model.hidden_act=swish is unknown"),
        ("model.model_type=bert", "model.model_type=bert is unknown; take one of gpt, mlp"),
    ],
)
def test_keys_and_types_are_exact(override, says):
    with pytest.raises(ValueError, match=rf"(?<![.\w]){re.escape(says)}") as refusal:  # a key from its beginning
        load(composed(override))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "ranks", "says"),
    [
        ("layout.tp=3", 4, "layout cp=1 x tp=3 x pp=1 = 3 does not divide the 4 ranks"),
        ("layout.dp=3", 4, "layout dp=3 x cp=1 x tp=1 x pp=1 = 3 does not equal the 4 ranks"),
        ("layout.order=[tp,cp,dp]", 1, "layout.order=['tp', 'cp', 'dp'] must name each of tp, cp, dp, pp once"),
        ("layout.dp=0", 4, "layout.dp=0 must be above 0"),
        ("layout.tp=8", 8, "model.num_attention_heads=4 cannot be cut over layout.tp=8; take layout.tp from [1, 2, 4]"),
        ("layout.tp=2 seq_len=127", 2, "seq_len=127 cannot be cut over layout.tp=2 under layout.sequence_parallel"),
        ("global_batch_size=6", 4, "global_batch_size=6 cannot be dealt over layout.dp=4; take a multiple of 4"),
        (
            "micro_batch_size=3",
            4,
            "global_batch_size=16 is not a multiple of layout.dp x micro_batch_size = 4 x 3 = 12; "
            "take micro_batch_size from [1, 2, 4]",
        ),
        ("micro_batch_size=0", 1, "micro_batch_size=0 must be above 0"),
        ("steps=0", 1, "steps=0 must be above 0"),
        ("stop_after=6 steps=5", 1, "stop_after=6 is beyond steps=5; take at most 5"),
        ("optim.min_lr=1", 1, "optim.min_lr=1.0 is above optim.lr=0.003"),
        ("optim.min_lr=1e-3 optim.lr=1e-4", 1, "optim.min_lr=0.001 is above optim.lr=0.0001; take at most 0.0001"),
        ("cluster.timeout_seconds=1e18", 2, "cluster.timeout_seconds=1e+18 is more than there can be; take at most "),
        ("cluster.threads=10000000000", 1, "cluster.threads=10000000000 is more than there can be; take at most 4096"),
        ("seed=9223372036854775808", 1, "seed=9223372036854775808 is more than there can be"),
        ("model.vocab_size=100000000000000", 1, "model.vocab_size=100000000000000 is more than there can be"),
        ("model.hidden_size=2147483640", 1, "model.num_hidden_layers=2 make "),
        (
            "model.hidden_size=100000000000000 model=mlp",
            1,
            "model.hidden_size=100000000000000 is more than there can be",
        ),
        ("optim.betas=[0.9]", 1, "optim.betas=[0.9] must be two numbers"),
        ("optim.warmup_steps=-1", 1, "optim.warmup_steps=-1 must be at least 0"),
        ("loss.label_smoothing=1", 1, "loss.label_smoothing=1.0 must be below 1"),
        ("layout.tp=3 model=mlp", 3, "model.hidden_size=1024 cannot be cut over layout.tp=3"),
        ("loss.z_loss=0.1 model=mlp", 1, "loss.z_loss=0.1 does nothing with model=mlp"),
        ("recompute=full model=mlp", 1, "recompute=full does nothing with model=mlp"),
        ("layout.cp=2", 2, "layout.cp=2 is not built yet; take layout.cp=1"),
        (
            "layout.pp=4",
            4,
            "model.num_hidden_layers=2 cannot fill the 4 stages of layout.pp x pipeline.virtual_stages; take at most 2",
        ),
        ("layout.pp=2 pipeline.split=[1,2]", 2, "pipeline.split=[1, 2] sums to 3, and model.num_hidden_layers=2"),
        ("layout.pp=2 pipeline.split=[2]", 2, "pipeline.split=[2] has 1 entries for the 2 stages"),
        ("layout.pp=2 pipeline.head_layers=-1", 2, "pipeline.head_layers=-1 must be at least 0"),
        ("layout.pp=2 pipeline.schedule=1f1", 2, "pipeline.schedule=1f1 is neither a schedule nor a file that can be"),
        ("pipeline.virtual_stages=0", 1, "pipeline.virtual_stages=0 must be above 0"),
        ("pipeline.virtual_stages=2", 1, "pipeline.virtual_stages=2 does not fit pipeline.schedule=1f1b: take 1"),
        (
            "layout.pp=2 pipeline.schedule=interleaved pipeline.virtual_stages=1",
            2,
            "pipeline.virtual_stages=1 does not fit pipeline.schedule=interleaved: take 2 or more; with one stage a "
            "rank it is 1f1b",
        ),
        (
            "pipeline.schedule=interleaved layout.pp=2 pipeline.group=1 model.num_hidden_layers=4",
            2,
            "pipeline.group=1 with layout.pp=2",
        ),
        ("layout.pp=2 pipeline.group=4", 2, "pipeline.group=4 does not fit pipeline.schedule=1f1b, which has none"),
        ("layout.ep=2", 2, "layout.ep=2 is not built yet; take layout.ep=1"),
        ("layout.etp=2", 2, "layout.etp=2 is not built yet; take layout.etp=1"),
        ("zero.stage=4", 2, "zero.stage=4 is unknown; take one of 0, 1, 2, 3"),
        ("zero.stage=1 zero.shard_over=3", 4, "zero.shard_over=3 does not divide layout.dp x cp = 4 x 1 = 4"),
        ("zero.shard_over=2", 4, "zero.shard_over=2 does nothing at zero.stage=0; take stage 1"),
        ("zero.stage=2 zero.prefetch=2", 4, "zero.prefetch=2 does nothing at zero.stage=2; take stage 3"),
        ("zero.stage=3 zero.prefetch=-1", 4, "zero.prefetch=-1 must be at least 0"),
        ("zero.stage=3 zero.reshard=step zero.reshard_after_forward=false", 4, "zero.reshard_after_forward=false says"),
        ("precision.gradients=bf16", 1, "precision.gradients=bf16 does not go with precision.compute=fp32"),
        ("precision.compute=bf16 precision.moments=fp32", 1, "precision.moments=fp32 does not go with"),
        (
            "precision.compute=bf16 precision.moments=bf16 optim.betas=[0.9,0.999]",
            1,
            "optim.betas[1]=0.999 is above 0.99, and a second moment in bf16 (precision.moments) would never come down",
        ),
        ("precision.stochastic_rounding=true", 1, "precision.stochastic_rounding=true rounds nothing"),
        ('optim.lr_multipliers=["*norm*"]', 1, "optim.lr_multipliers[0]=*norm* must be pattern=factor"),
        ('optim.lr_multipliers=["a=1","b=-1"]', 1, "optim.lr_multipliers[1]=b=-1 must be pattern=factor"),
        ("checkpoint.every=10", 1, "checkpoint.every=10 is not built yet; take checkpoint.every=0"),
        ("optim.decay_steps=5", 1, "optim.decay_steps=5 does nothing with optim.schedule=cosine; take wsd"),
        ("seq_len_ramp=[[1,64]]", 1, "seq_len_ramp[0]: step=1 must lie from 2 to steps=200, in rising order"),
        ("seq_len_ramp=[[5,64],[5,32]]", 1, "seq_len_ramp[1]: step=5 must lie from 6 to steps=200, in rising order"),
        ("seq_len_ramp=[[5]]", 1, "seq_len_ramp[0]=[5] must be [step, value] with a value of at least 1"),
        ("seq_len_ramp=[[5,31]] layout.tp=2", 2, "from step 5 on seq_len=31 cannot be cut over layout.tp=2"),
        ("global_batch_size_ramp=[[9,6]]", 4, "from step 9 on global_batch_size=6 cannot be dealt over layout.dp=4"),
        ("global_batch_size_ramp=[[9,2147483648]]", 1, "global_batch_size_ramp[0]=[9, 2147483648] is more than there "),
        ("recompute=selective recompute_ops=[mpl]", 1, "recompute_ops has mpl, which is unknown; take from norm, "),
        ("recompute=full recompute_every=0", 1, "recompute_every=0 must be above 0"),
        ("global_batch_size_ramp=[[201,6]]", 1, "global_batch_size_ramp[0]: step=201 must lie from 2 to steps=200"),
        ("seq_len_ramp=[[9,6]] model=mlp", 1, "seq_len_ramp=[[9, 6]] does nothing with model=mlp"),
        ("data.phases=[{from_step:0,paths:[a]}]", 1, "data.phases[0]: from_step=0 must lie from 2 to steps=200"),
        ("data.phases=[{from_step:2,paths:[]}]", 1, "data.phases[0].paths=[] names no source"),
        ("data.validation_period=1", 1, "data.validation_period=1 keeps everything for evaluation"),
        ("data.validation_period=0 eval.every=1", 1, "eval.every=1 has nothing to read with data.validation_period=0"),
        ("profile.steps=[3]", 1, "profile.steps=[3] must be [first, last], within 1 to 200"),
        ("profile.steps=[3,2]", 1, "profile.steps=[3, 2] must be [first, last], within 1 to 200"),
        ("profile.steps=[1,2] profile.ranks=[2]", 2, "profile.ranks=[2]: rank 2 is none of 0 to 1"),
        ("link.axis=tpp", 2, "link.axis=tpp is unknown; take one of dp, cp, tp, pp, ep, etp"),
        ("link.axis=tp", 2, "link.axis=tp has 1 rank, so nothing crosses it; take one of dp"),
        ("link.axis=dp", 1, "link.axis=dp has 1 rank, so nothing crosses it; start more ranks"),
        ("link.bandwidth_gb_per_sec=0", 1, "link.bandwidth_gb_per_sec=0.0 must be above 0"),
        ("link.latency_ms=-1", 1, "link.latency_ms=-1.0 must be at least 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key_and_the_numbers(overrides, ranks, says):
    plain, _, model = overrides.partition("model=")
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        check(load(composed(*plain.split(), model=model or "gpt-tiny")), ranks)
    assert "\n" not in str(refusal.value)


def test_what_may_be_recomputed_is_what_the_layers_know():
    assert RECOMPUTED == OPS


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("model", [GPTConfig(), MLPConfig()], ids=["gpt", "mlp"])
def test_the_defaults_are_legal_for_dp_and_tp_of_1_2_and_4(model, dp, tp):
    config = check(replace(Config(), model=model, layout=LayoutConfig(tp=tp)), dp * tp)
    assert config.layout.dp == dp
    assert config.layout.sequence_parallel == (tp > 1 and isinstance(model, GPTConfig))


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_choice_of_every_group_composes_and_is_legal_on_eight_ranks(path):
    choices = [f"{path.parent.name}={path.stem}", *(["model=llama3-8b"] if path.stem == "tp8" else [])]
    check(load(choosing(*choices)), 8)


@pytest.mark.parametrize("lr", [0.0, 1e-4, 10.0])
def test_any_peak_rate_is_legal_alone_and_its_lowest_is_a_tenth_of_it(lr):
    config = check(load(composed(f"optim.lr={lr}")), 1)
    assert config.optim.lowest_lr == lr / 10


def test_what_is_set_is_kept():
    config = check(load(composed("layout.tp=2", "layout.sequence_parallel=false", "micro_batch_size=2")), 4)
    assert (config.layout.sequence_parallel, config.micro_batch_size) == (False, 2)


def test_the_run_ends_at_stop_after_and_evaluates_there():
    config = load(composed("steps=20", "stop_after=7", "eval.every=3"))
    assert config.last_step == 7
    assert [step for step in range(1, 8) if config.evaluates(step)] == [3, 6, 7]
    assert not any(Config().evaluates(step) for step in range(1, Config().last_step + 1))
