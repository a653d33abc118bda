"""The formulas of two papers give the papers' figures."""

from __future__ import annotations

import pytest

from megalite.cost.published import GB, largest_model, layer_activations, state_bytes

# arXiv:1910.02054, table 1: GB a device by (parameters, data ranks), for stages 1, 2 and 3.
TABLE_1 = {
    (7.5e9, 1): (120, 120, 120),
    (7.5e9, 4): (52.5, 41.3, 30),
    (7.5e9, 16): (35.6, 21.6, 7.5),
    (7.5e9, 64): (31.4, 16.6, 1.88),
    (7.5e9, 256): (30.4, 15.4, 0.47),
    (7.5e9, 1024): (30.1, 15.1, 0.12),
    (128e9, 1): (2048, 2048, 2048),
    (128e9, 4): (896, 704, 512),
    (128e9, 16): (608, 368, 128),
    (128e9, 64): (536, 284, 32),
    (128e9, 256): (518, 263, 8),
    (128e9, 1024): (513, 257, 2),
    (1e12, 1): (16000, 16000, 16000),
    (1e12, 4): (7000, 5500, 4000),
    (1e12, 16): (4750, 2875, 1000),
    (1e12, 64): (4187, 2218, 250),
    (1e12, 256): (4046, 2054, 62.5),
    (1e12, 1024): (4011, 2013, 15.6),
}
FITS_32_GB = {(7.5e9, 1): 64, (7.5e9, 2): 16, (7.5e9, 3): 4, (128e9, 3): 64, (1e12, 3): 1024}
"""(parameters, stage) -> the fewest ranks of the table at which a 32 GB device holds its share; printed bold there."""


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_zero(stage, gigabytes):
    assert state_bytes(7.5e9, stage=stage, ranks=64) / GB == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize("case", TABLE_1)
def test_table_1_of_zero(case):
    """To the last digit that is printed, up or down: the table rounds some cells (41.25) and cuts others (513.5)."""
    parameters, ranks = case
    for stage, printed in enumerate(TABLE_1[case], start=1):
        digits = len(str(printed).partition(".")[2])
        found = state_bytes(parameters, stage=stage, ranks=ranks) / GB
        assert abs(found - printed) < 1.0001 * 10**-digits, stage


def test_what_fits_into_32_gb():
    """Stage 1 at 64 ranks is 31.4 GB, which the paper counts as fitting; 1T at stage 3 and 1024 ranks takes 15.6."""
    for (parameters, stage), fewest in FITS_32_GB.items():
        needed = [ranks for count, ranks in TABLE_1 if count == parameters]
        fitting = [ranks for ranks in needed if state_bytes(parameters, stage=stage, ranks=ranks) <= 32 * GB]
        assert min(fitting) == fewest


@pytest.mark.parametrize(("stage", "billions"), [(0, 6.66), (1, 16), (2, 24.6), (3, 53.3)])
def test_what_8_devices_of_80_gb_hold_at_12_bytes_a_parameter(stage, billions):
    """2 + 2 + 8: bf16 weights and gradients, and two moments in fp32 without masters."""
    found = largest_model(80 * GB, stage=stage, ranks=8, optimizer=8)
    assert found / 1e9 == pytest.approx(billions, rel=2e-3)  # 6.667 is printed as 6.66


def test_activations_are_the_paper_s_formulas():
    """arXiv:2205.05198, table 2, for its 22B model: s=2048, a=64, h=6144, b=4, t=8."""
    shape = {"batch": 4, "seq": 2048, "hidden": 6144, "heads": 64}
    sbh, scores = 2048 * 4 * 6144, 5 * 64 * 2048 / 6144
    cut = {"tp": 8, "sequence_parallel": True}
    assert layer_activations(**shape) == pytest.approx(sbh * (34 + scores))
    assert layer_activations(**shape, tp=8) == pytest.approx(sbh * (10 + 24 / 8 + scores / 8))
    assert layer_activations(**shape, **cut) == pytest.approx(sbh / 8 * (34 + scores))
    assert layer_activations(**shape, **cut, recompute="selective") == pytest.approx(sbh * 34 / 8)
    assert layer_activations(**shape, **cut, fused_attention=True) == pytest.approx(sbh * 34 / 8)
    assert layer_activations(**shape, recompute="full") == pytest.approx(sbh * 2)


# MiB a layer of each model of table 3: batch, hidden, heads; whole, tp, tp + sp, tp selective, both.
LAYERS = {
    "22B": (4, 6144, 64, 6752, 1264, 844, 624, 204),
    "175B": (1, 12288, 96, 2736, 552, 342, 312, 102),
    "530B": (1, 20480, 128, 3920, 840, 490, 520, 170),
    "1T": (1, 25600, 160, 4900, 1050, 612.5, 650, 212.5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_activations_of_the_paper_s_four_models(name):
    batch, hidden, heads, *mebibytes = LAYERS[name]
    shape = {"batch": batch, "seq": 2048, "hidden": hidden, "heads": heads}
    selective = {"recompute": "selective"}
    ways = ({}, {"tp": 8}, {"tp": 8, "sequence_parallel": True}, {"tp": 8} | selective)
    ways += ({"tp": 8, "sequence_parallel": True} | selective,)
    assert [layer_activations(**shape, **way) / 2**20 for way in ways] == pytest.approx(mebibytes)
