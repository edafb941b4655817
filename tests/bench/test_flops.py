# SPDX-License-Identifier: Apache-2.0
"""The counted work of a prompt, and what the bench makes of its measurements."""

import dataclasses
import itertools
import json

import pytest

from bench.__main__ import Point, plot, roofline, table
from bench.flops import (
    E2B,
    E4B,
    GAUDI2,
    GAUDI3,
    Fast,
    Shape,
    attention,
    limit,
    projections,
    prompt_flops,
    prompt_seconds,
)
from bench.parts import buffer_bytes, counted_table, measured_table, parts_of_the_series
from bench.worker import random_prompts
from graft import series


def parameters(shape, layers):
    return sum(sum(projections(shape, layer)) for layer in layers) / 1e6


@pytest.mark.parametrize(("shape", "own", "shared"), [(E2B, 563.9, 1299.2), (E4B, 2285.9, 1659.4)], ids=["E2B", "E4B"])
def test_counts_the_parameters_of_the_published_models(shape, own, shared):
    assert parameters(shape, range(shape.own)) == pytest.approx(own, abs=0.05)
    assert parameters(shape, range(shape.own, len(shape.layer_types))) == pytest.approx(shared, abs=0.05)


def test_the_flag_saves_more_where_more_layers_are_shared():
    assert 3.3 < limit(E2B, 1024) < 3.5
    assert 1.7 < limit(E4B, 1024) < 1.85


def test_a_prompt_of_one_token_has_nothing_to_save():
    assert limit(E2B, 1) == 1


def test_each_part_saves_more():
    """The first is the skip of the KV-shared layers alone, whose limit is known from the parameters."""
    limits = [limit(E2B, 1024, fast) for fast in (Fast(False), Fast(), Fast(True, True))]
    assert limits == sorted(limits)
    assert limits[0] == pytest.approx(3.19, abs=0.01)
    assert limits[2] >= 3.45 and limit(E2B, 8192, Fast(True, True)) >= 3.4


@pytest.mark.parametrize("shape", [E2B, E4B], ids=["E2B", "E4B"])
def test_a_cached_half_leaves_the_same_to_save_of_the_rest(shape):
    for length in (1024, 2048, 8192):
        assert limit(shape, length // 2, cached=length // 2) == pytest.approx(limit(shape, length), rel=0.03)


def test_cached_tokens_cost_nothing_but_attention():
    without, behind = (prompt_flops(E2B, 256, None, cached) for cached in (0, 4096))
    full = [layer for layer, kind in enumerate(E2B.layer_types) if kind == "full_attention"]
    assert without < behind < without + 2 * 256 * sum(attention(E2B, layer, 4096 + 512) for layer in range(35))
    assert behind - without >= 2 * 256 * sum(attention(E2B, layer, 4096) for layer in full)


def test_the_work_without_the_flag_grows_with_the_prompt_and_the_window_bounds_it():
    short, long = (prompt_flops(E2B, length, None) / length for length in (8192, 16384))
    assert short < long < 1.6 * short


def test_a_single_small_forward_is_bound_by_reading_the_weights():
    off, on = (prompt_seconds(E2B, GAUDI3, 64, 1, fast, reached=0.5) for fast in (False, True))
    assert off == on
    off, on = (prompt_seconds(E2B, GAUDI2, 1024, 8, fast, reached=0.5) for fast in (False, True))
    assert off / on == pytest.approx(limit(E2B, 1024))


def test_reads_the_shape_from_a_config():
    config = {
        "layer_types": list(E2B.layer_types),
        "num_kv_shared_layers": 20,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
    }
    assert Shape.of(config) == E2B


def test_prompts_are_random_but_the_same_for_the_same_seed():
    first, second = random_prompts(2, 100, 500, seed=3), random_prompts(2, 100, 500, seed=3)
    assert first == second and first[0] != first[1]
    assert all(len(prompt["prompt_token_ids"]) == 100 for prompt in first)


def test_the_start_of_prompts_can_be_shared():
    first, second = (prompt["prompt_token_ids"] for prompt in random_prompts(2, 100, 500, seed=3, shared=60))
    assert first[:60] == second[:60] and first[60:] != second[60:] and len(first) == 100


@pytest.fixture
def points():
    found = []
    for length in (512, 1024):
        point = Point(length, 8, prompts=4, limits={"off": 1.0, "on": 3.4})
        point.seconds = {"off": [3.0, 9.0, 2.0], "on": [1.0, 1.2, 0.8]}
        point.decode = {"off": [0.10, 0.12], "on": [0.11, 0.11]}
        point.peak = {"off": 200, "on": 150}
        found.append(point)
    return found


def test_a_ratio_is_that_of_the_medians(points):
    assert points[1].ratio() == pytest.approx(3.0)
    assert points[1].rate("on") == pytest.approx(4 * 1024)
    assert points[1].decode_ratio() == pytest.approx(1.0)


def test_tables_show_what_was_measured_beside_its_limit(points):
    assert len(table(points, "wall").columns) == 9
    assert table(points, "cpu").row_count == 2
    assert roofline(E2B, points, [GAUDI2, GAUDI3], 0.5).row_count == 4


def test_points_are_written_as_json(points):
    [first, _] = json.loads(json.dumps([dataclasses.asdict(point) for point in points]))
    assert first["seconds"]["off"] == [3.0, 9.0, 2.0] and first["cached"] == 0


def test_a_plot_is_written_as_png_and_svg(points, tmp_path):
    pytest.importorskip("matplotlib", reason="only the plot needs matplotlib")
    plot(points, tmp_path / "plot")
    assert {path.name for path in tmp_path.iterdir()} == {"plot.png", "plot.svg"}


def test_cached_prompts_get_a_column_and_no_place_in_the_bounds(points):
    behind = dataclasses.replace(points[1], cached=512)
    assert behind.rate("on") == pytest.approx(4 * 512)
    assert len(table([*points, behind], "wall").columns) == 10
    assert roofline(E2B, [*points, behind], [GAUDI2], 0.5).row_count == 2


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return parts_of_the_series(tmp_path_factory.mktemp("series"))


def test_the_parts_are_those_of_the_series_and_each_pays_or_lets_more_in(parts):
    assert [part.name for part in parts] == [stage.name for stage in series.stages()]
    first, last = parts[0], parts[-1]
    assert [part.lines for part in parts] == sorted({part.lines for part in parts})
    assert first.limit(E2B, 2048) == pytest.approx(3.19, abs=0.02)
    assert first.limit(E2B, 2048, cached=1024) == first.limit(E2B, 2048, lora=True) == 1
    assert last.limit(E2B, 2048) >= 3.45
    assert last.limit(E2B, 2048, cached=1024) == pytest.approx(last.limit(E2B, 1024), rel=0.03)
    for before, after in itertools.pairwise(parts):
        gains = [after.limit(E2B, 2048, cached, lora=lora) for cached in (0, 1024) for lora in (False, True)]
        losses = [before.limit(E2B, 2048, cached, lora=lora) for cached in (0, 1024) for lora in (False, True)]
        names = ("text_only", "frees_buffers", "refuses")
        opened = any(getattr(after, name) != getattr(before, name) for name in names)
        assert all(gain >= loss for gain, loss in zip(gains, losses, strict=True))
        assert gains != losses or opened, after.name
        assert after.environ or not after.per_layer_inputs  # what is off by default has to be asked for


def test_the_parts_have_a_row_each(points, parts):
    for point in points:
        point.seconds = {"off": [3.0], **{part.name: [1.0] for part in parts}}
        point.limits = {part.name: part.limit(E2B, point.length) for part in parts}
    measured, counted = measured_table(parts, points), counted_table(parts, E2B, 1024)
    assert measured.row_count == counted.row_count == len(parts)
    assert list(measured.columns[1].cells) == ["3.00"] * len(parts)
    lines = [int(cell) for cell in counted.columns[-1].cells]
    assert sum(lines) == parts[-1].lines and all(line > 0 for line in lines)


def test_the_size_of_the_buffers_is_what_vllm_allocates():
    """8 bytes of position, and of each of 1,536 states and 35 * 256 per-layer inputs two."""
    assert buffer_bytes(E2B, 8192) == 8192 * 21_000
