"""Faults that have a test in another file, for the table."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """fault, caught_by, said: as in the table. test: of pytest, with its parameter or without for all of them.

    refused: False for what is handled.
    """

    fault: str
    caught_by: str
    said: str
    test: str
    refused: bool = True


LINT = "tests/gate/test_lint.py::"
PLANTED = f"{LINT}test_a_planted_tensor_is_found_without_the_artifact"
LINES = [
    Line(
        "unknown keys, wrong types and contradictions in a recipe",
        "recipe",
        "all at once, each with its path and did-you-mean",
        "tests/test_recipe.py::test_all_errors_come_at_once_with_their_paths_and_a_suggestion",
    ),
    Line(
        "YAML that is meant to break readers",
        "recipe",
        "refused in words",
        "tests/test_fuzz_recipe.py::test_yaml_that_is_meant_to_break_readers",
    ),
    Line(
        "more disk needed than is free",
        "recipe",
        "needs X GB more disk and Y GB is free; free some, choose fewer export.formats, or set output",
        "tests/test_plan.py::test_a_full_disk_is_refused_with_both_numbers",
    ),
    Line(
        "a hub id without a network",
        "load",
        "could not be fetched from the hub (HF_HUB_OFFLINE is set); the token is not in any log",
        "tests/test_parent.py::test_offline_a_hub_id_fails_in_one_line_without_the_token",
    ),
    Line(
        "experts stacked as transformers computes with them",
        "load",
        "save the model with save_pretrained(folder, save_original_format=True)",
        "tests/test_arch.py::test_stacked_experts_say_how_to_store_them",
    ),
    Line(
        "evaluation text copied from the calibration or training text",
        "data",
        "holds text of data.calibration: a model is judged on text that it was not made with",
        "tests/test_trust.py::test_a_model_is_not_judged_on_text_that_it_was_made_with",
    ),
    Line(
        "a passage of evaluation text inside calibration or training text",
        "data",
        "cut out of it, and counted in the report",
        "tests/test_overlap.py::test_a_run_cuts_and_counts",
        False,
    ),
    Line(
        "a text that is too short for training and validation",
        "data",
        "one window is too few",
        "tests/test_loop.py::test_one_window_is_too_few",
    ),
    Line(
        "a linear that saw few tokens",
        "calibrate",
        "rounded to nearest at the widest range; layers.csv names it",
        "tests/test_runner.py::test_a_linear_that_saw_few_tokens_is_rounded_without_statistics",
        False,
    ),
    Line(
        "an expert never chosen, with static input scales",
        "calibrate",
        "takes the scale that all experts of the block share",
        "tests/test_runner.py::test_experts_share_one_static_input_scale",
        False,
    ),
    Line(
        "a training loss that is no number",
        "train",
        "FloatingPointError; nothing is kept",
        "tests/test_loop.py::test_a_loss_that_is_no_number_stops_training",
    ),
    Line(
        "training that makes the model worse",
        "train",
        "made the model worse: the run fails",
        "tests/test_pipeline.py::test_training_that_goes_wrong_is_a_failure_of_the_run",
    ),
    Line(
        "a format that cannot hold the model",
        "export",
        "refused before anything is written",
        "tests/test_export.py::test_what_cannot_be_written_is_refused_before_anything_is",
    ),
    Line(
        "missing, stale and duplicated shards of an export, a wrong index",
        "lint",
        "listed in A, but is in B; also in C; missing beside N shards",
        f"{LINT}test_index_and_shards_are_held_against_each_other",
    ),
    Line(
        "truncated, padded, empty and pointer shards of an export, a header that lies",
        "lint",
        "a shard must be whole: export or copy it again",
        f"{LINT}test_a_shard_that_is_not_whole_is_found",
    ),
    Line("a NaN scale", "lint", "every stored value is finite", f"{PLANTED}[NaN scale]"),
    Line("a scale of 0", "lint", "zero or negative; raise it to 2^-14", f"{PLANTED}[zero scale]"),
    Line("a subnormal scale", "lint", "subnormal; raise it to 2^-14", f"{PLANTED}[subnormal scale]"),
    Line("an infinite bias", "lint", "every stored value is finite", f"{PLANTED}[infinite bias]"),
    Line(
        "a missing tensor in an export", "lint", "missing; engines leave it uninitialised", f"{PLANTED}[tensor missing]"
    ),
    Line("GPTQ zero points of version 2", "lint", "the zero word of version 1", f"{PLANTED}[zeros of version 2]"),
    Line("activation order", "lint", "engines drop g_idx: use static groups", f"{PLANTED}[activation order]"),
    Line(
        "a bias that the engine drops",
        "lint",
        "no flag of the config declares it: vllm drops it silently; set mlp_bias: true",
        f"{LINT}test_a_planted_config_is_found[flag off]",
    ),
    Line(
        "a tied head stored beside the embedding",
        "lint",
        "leave it out, or set the flag to false",
        f"{LINT}test_a_planted_config_is_found[tied head stored]",
    ),
    Line(
        "a group size that ranks of tensor parallelism split",
        "lint",
        "serve with fewer ranks, or quantize with a smaller group_size",
        "tests/gate/test_lint_engines.py::test_ranks_that_split_a_group_are_found",
    ),
    Line(
        "one code, zero point, bias, norm or scale that is not the artifact's",
        "lint",
        "it must equal its source exactly",
        f"{LINT}test_what_differs_from_its_source_is_found",
    ),
    Line(
        "a latency bound without the engine that is to be measured",
        "gate",
        "an error before anything is calibrated",
        "tests/gate/test_latency.py::test_a_missing_engine_is_an_error_before_anything_is_calibrated",
    ),
    Line(
        "scales of one block 5% too large",
        "gate",
        "refused by the KL to the parent",
        "tests/gate/test_damage.py::test_scales_of_one_block_off_by_five_percent_are_refused_by_kl",
    ),
    Line(
        "logits that are not finite",
        "gate",
        "refused whatever the bounds",
        "tests/gate/test_stage.py::test_logits_that_are_not_finite_are_refused_whatever_the_bounds",
    ),
    Line(
        "a parent that does not know the text",
        "gate",
        "anomalous: its perplexity is above its vocabulary",
        "tests/gate/test_statistics.py::test_a_parent_that_does_not_know_the_text_is_anomalous",
    ),
    Line(
        "bytes changed after they were measured",
        "gate",
        "was changed after it was exported; nothing is released from it",
        "tests/test_trust.py::test_bytes_that_changed_after_they_were_measured_are_not_released",
    ),
    Line(
        "a stage damaged after it was finished",
        "run",
        "made again: x has N bytes, not M",
        "tests/test_stages.py::test_a_damaged_stage_is_made_again",
        False,
    ),
    Line(
        "rank 0 killed while others wait",
        "run",
        "rank 0 is gone without a word",
        "tests/test_ranks.py::test_other_ranks_fail_when_rank_0_does",
    ),
    Line(
        "ranks started with different recipes",
        "run",
        "the ranks read different recipes or files",
        "tests/test_ranks.py::test_other_ranks_fail_when_rank_0_does",
    ),
    Line(
        "a run killed at every stage boundary and at random moments",
        "run",
        "goes on to the same bytes",
        "tests/test_drill.py::test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes",
        False,
    ),
    Line(
        "a run that is terminated",
        "run",
        "summary.json says failed: interrupted",
        "tests/test_stages.py::test_a_terminated_run_says_so_in_its_summary",
    ),
    Line(
        "an old verdict and a run that never finished",
        "run",
        "summary.json says failed until a run has finished",
        "tests/test_trust.py::test_an_older_verdict_does_not_stand_for_a_run_that_never_finished",
    ),
]
