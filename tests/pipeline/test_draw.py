"""Every action stands in the picture where it happens, however it is drawn."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.draw import MOST_BANDS, boxes, legend, looks, png, svg, text, text_legend
from megalite.pipeline.schedule import Action, Schedule, parse
from megalite.pipeline.simulate import Costs, simulate

SVG = "{http://www.w3.org/2000/svg}"


def test_a_box_is_as_wide_as_its_action_is_long_with_dots_where_a_rank_waits():
    assert text(simulate(make("1f1b", ranks=2, microbatches=2))).splitlines() == [
        "       0                9",
        "rank 0 F0F1....BW0-..BW1-",
        "rank 1   F0BW0-F1BW1-",
    ]


def test_uneven_costs_keep_whole_characters_for_the_shortest():
    drawn = text(simulate(parse("F0@0 B0@0 W0@0"), Costs(1, Fraction(3, 2), Fraction(1, 2))))
    assert drawn.splitlines()[1] == "rank 0 F0--B0----W0"


def test_virtual_stages_are_told_apart():
    two = make("zb_v", ranks=2, microbatches=3)
    assert [looks(two)["B", stage].name for stage in range(4)] == ["B", "B", "b", "b"]
    three = make("interleaved", ranks=2, microbatches=3, virtual_stages=3)
    assert [looks(three)["BW", stage].name for stage in range(6)] == ["BWa", "BWa", "BWb", "BWb", "BWc", "BWc"]
    assert "small letters: a rank's second stage" in text_legend(two)
    assert "a to c: a rank's stages in order" in text_legend(three)


LABEL = re.compile(r"(BW|bw|[FBWfbw])([a-z]?)(\d+)-*")


def words_of(line: str, schedule: Schedule, rank: int) -> list[Action]:
    """The actions that a line of text shows, without knowing how they were drawn."""
    stages = schedule.stages_of(rank)
    found = []
    for name, letter, microbatch in LABEL.findall(line):
        virtual_stage = ord(letter) - ord("a") if letter else int(name.islower())
        found.append(Action(name.upper(), stages[virtual_stage], int(microbatch)))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 8, 12])
def test_a_line_reads_back_as_its_row(name, microbatches):
    """In one band: each box has room for its name and number."""
    schedule = make(name, ranks=4, microbatches=microbatches)
    timeline = simulate(schedule, Costs(latency=Fraction(1, 2)))
    lines = text(timeline, width=10_000).splitlines()
    assert len(lines) == 5
    for rank, line in enumerate(lines[1:]):
        assert words_of(line.removeprefix(f"rank {rank} "), schedule, rank) == list(schedule.rows[rank])


@settings(deadline=None, max_examples=50)
@given(
    name=st.sampled_from(list(SCHEDULES)),
    microbatches=st.integers(1, 30),
    width=st.integers(30, 200),
    costs=st.tuples(*[st.fractions(Fraction(1, 4), 5, max_denominator=4)] * 3),
)
def test_no_line_is_longer_than_the_width_and_bands_together_are_the_whole(name, microbatches, width, costs):
    timeline = simulate(make(name, ranks=3, microbatches=microbatches), Costs(*costs))
    lines = text(timeline, width=width).splitlines()
    assert len(lines) % 4 == 0 and len(lines) <= 4 * (MOST_BANDS * 4 // 3 + 1)  # a band may end a quarter sooner
    assert all(len(line) <= width for line in lines)
    edges = [line.split() for line in lines[::4]]
    assert edges[0][0] == "0"
    assert all(before[-1] == after[0] for before, after in pairwise(edges))


def test_colours_change_no_letter():
    timeline = simulate(make("zb_v", ranks=2, microbatches=4))
    coloured = text(timeline, colour=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == text(timeline)
    assert "\x1b[0;37;48;2;0;114;178mF0" in coloured and "\x1b" not in text(timeline)
    assert all(line.count("\x1b") == 0 or line.endswith("\x1b[0m") for line in coloured.splitlines())


def brightness(colour: tuple[int, int, int]) -> float:
    """Relative luminance of WCAG 2."""
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("virtual_stages", [2, 3, 4])
def test_what_is_written_can_be_read_on_its_box_and_later_stages_are_lighter(virtual_stages):
    """Contrast of 3 : 1 at least, as WCAG 2 asks of graphics and large letters."""
    entries = legend(make("interleaved_zb", ranks=2, microbatches=2, virtual_stages=virtual_stages))
    assert len({entry.fill for entry, _ in entries}) == 3 * virtual_stages
    for entry, _ in entries:
        lighter, darker = sorted((brightness(entry.fill), brightness(entry.ink)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3, entry
    for kind in range(3):
        mine = [brightness(entry.fill) for entry, _ in entries[kind * virtual_stages : (kind + 1) * virtual_stages]]
        assert mine == sorted(mine)


def test_the_svg_has_every_action_at_its_place_and_says_what_it_is():
    schedule = make("dualpipe_v", ranks=2, microbatches=6)
    timeline = simulate(schedule, Costs(latency=Fraction(1, 3)))
    picture = ElementTree.fromstring(svg(timeline, title="a < b & c"))
    groups = picture.findall(f"{SVG}g")
    titles = [group.find(f"{SVG}title").text for group in groups]
    words = [str(action) for row in schedule.rows for action in row]
    assert [title.partition(":")[0] for title in titles] == words
    lefts = {}
    for group, box in zip(groups, boxes(timeline), strict=True):
        drawn = group.find(f"{SVG}rect")
        lefts.setdefault(box.rank, []).append((float(drawn.get("x")), box.left))
        assert group.find(f"{SVG}text").text == str(box.action.microbatch)
        assert (drawn.get("stroke") == "#000000") == box.paired
    (first, at), (last, later) = lefts[0][0], lefts[0][-1]
    scale = (last - first) / (later - at)
    for places in lefts.values():
        assert all(x == pytest.approx(first + scale * (left - at), abs=0.2) for x, left in places)  # written to 0.1
    assert "a < b & c" in [each.text for each in picture.findall(f"{SVG}text")]
    assert 0 < sum(box.paired for box in boxes(timeline)) == 2 * len(schedule.paired)


def test_what_takes_no_time_is_no_picture():
    with pytest.raises(ValueError, match="takes no time, so there is nothing to draw"):
        svg(simulate(parse("F0@0 BW0@0"), Costs(0, 0, 0)))


def test_it_is_drawn_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    png(simulate(make("zb_v", ranks=4, microbatches=8)), tmp_path / "zb_v.png", title="zb_v")
    assert (tmp_path / "zb_v.png").read_bytes().startswith(b"\x89PNG")
