# SPDX-License-Identifier: Apache-2.0
"""The counted work of a prompt, and what the bench makes of its measurements."""

import pytest

from bench.__main__ import Point, plot, roofline, table
from bench.flops import E2B, E4B, GAUDI2, GAUDI3, Shape, limit, projections, prompt_flops, prompt_seconds
from bench.worker import random_prompts


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


def test_the_work_without_the_flag_grows_with_the_prompt_and_the_window_bounds_it():
    short, long = (prompt_flops(E2B, length, fast=False) / length for length in (8192, 16384))
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


@pytest.fixture
def points():
    found = []
    for length in (512, 1024):
        point = Point(length, 8, prompts=4, limit=3.4)
        point.seconds = {"off": [3.0, 9.0, 2.0], "on": [1.0, 1.2, 0.8]}
        point.decode = {"off": [0.10, 0.12], "on": [0.11, 0.11]}
        point.peak = {"off": 200, "on": 150}
        found.append(point)
    return found


def test_a_ratio_is_that_of_the_medians(points):
    assert points[1].ratio == pytest.approx(3.0)
    assert points[1].rate("on") == pytest.approx(4 * 1024)
    assert points[1].decode_ratio == pytest.approx(1.0)


def test_tables_show_what_was_measured_beside_its_limit(points):
    assert len(table(points, "wall").columns) == 9
    assert table(points, "cpu").row_count == 2
    assert roofline(E2B, points, [GAUDI2, GAUDI3], 0.5).row_count == 4


def test_a_plot_is_written_as_png_and_svg(points, tmp_path):
    pytest.importorskip("matplotlib", reason="only the plot needs matplotlib")
    plot(points, tmp_path / "plot")
    assert {path.name for path in tmp_path.iterdir()} == {"plot.png", "plot.svg"}
