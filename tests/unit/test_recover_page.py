"""Every row of `docs/how-to/recover.md` is a test: the table here says which."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = "contract/test_publisher_faults.py"
EMULATOR = "contract/test_publisher_emulator.py"
RUNS = "unit/core/test_publisher_runs.py"
TROUBLE = "unit/core/test_publisher_trouble.py"
TENSORS = "unit/core/test_publisher_tensor_runs.py"
KILLS = "e2e/test_publisher_kills.py"
PROCESS = "e2e/test_publisher_process.py"

ROWS = {
    "The trainer is killed while a version is published": (
        KILLS,
        "test_killed_anywhere_it_goes_on_and_nothing_wrong_is_ever_served",
    ),
    "The trainer is killed while the base checkpoint is uploaded": (
        PROCESS,
        "test_a_process_ends_while_its_baseline_is_on_its_way_and_the_next_one_goes_on",
    ),
    "The process ends while the base is on its way in its thread": (
        PROCESS,
        "test_a_process_ends_while_its_baseline_is_on_its_way_and_the_next_one_goes_on",
    ),
    "The machine is lost, and the new one has an empty disk": (
        EMULATOR,
        "test_a_restart_opens_an_epoch_uploads_no_base_and_chains_to_it",
    ),
    "The state directory is deleted, and the writer goes on with its numbers": (
        RUNS,
        "test_a_writer_that_goes_on_finds_again_what_was_published",
    ),
    "The machine crashes, and the mirror on its disk is damaged": (
        EMULATOR,
        "test_a_damaged_mirror_is_made_again_from_the_bucket_after_a_crash_of_the_machine",
    ),
    "A tensor-fed publisher with its base in memory restarts": (
        TENSORS,
        "test_a_restart_with_the_base_in_memory_begins_in_full",
    ),
    "A delta fails in the engine on one replica": (
        FAULTS,
        "test_a_delta_that_fails_on_one_replica_is_published_in_full_and_the_next_one_is_a_delta",
    ),
    "A full snapshot fails in the engine as well": (TROUBLE, "test_a_full_snapshot_that_fails_as_well_stops_the_run"),
    "A delta fails where the chain is never cut (`CWTRAIN_HOTLOAD_FULL_EVERY=0`)": (
        TROUBLE,
        "test_where_the_chain_is_never_cut_a_failed_delta_stops_the_run_and_nothing_moves_on",
    ),
    "With `CWTRAIN_HOTLOAD_WAIT=0` a hot-load fails after the call returned": (
        FAULTS,
        "test_with_wait_0_the_next_call_looks_at_how_the_last_one_ended",
    ),
    "The API or the store does not answer for longer than one call waits": (
        FAULTS,
        "test_an_outage_longer_than_the_budget_of_a_call_is_survived_in_every_wait",
    ),
    "The API or the store stays away for longer than that": (
        FAULTS,
        "test_an_outage_longer_than_the_deadline_is_an_error_that_says_what_to_do",
    ),
    "A hot-load does not end in time": (
        FAULTS,
        "test_after_a_time_out_the_state_is_read_again_before_anything_is_decided",
    ),
    "An upload takes longer than `CWTRAIN_HOTLOAD_DEADLINE`": (
        PROCESS,
        "test_an_upload_stops_at_the_deadline_and_the_same_call_goes_on",
    ),
    "The bucket refuses writes": (FAULTS, "test_a_bucket_that_refuses_writes_stops_the_run_with_the_permission"),
    "The trainer deletes a version's directory while it is read": (
        TROUBLE,
        "test_a_directory_that_is_cleaned_up_while_it_is_read_is_an_error_that_a_retry_mends",
    ),
    "Another run's hot-load is under way on the deployment": (
        FAULTS,
        "test_another_runs_hot_load_is_waited_for_and_named",
    ),
    "Two trainers publish under one run id": (
        FAULTS,
        "test_a_second_publisher_of_the_run_takes_it_over_and_the_first_sends_nothing_more",
    ),
    "The deployment is replaced by another one on the same bucket and prefix": (
        RUNS,
        "test_another_deployment_on_the_same_bucket_gets_the_base_without_an_upload",
    ),
    "The deployment refuses a chain through the base, which it no longer serves": (
        FAULTS,
        "test_a_deployment_that_refuses_a_chain_through_an_older_snapshot_loads_the_base_again_first",
    ),
    "The base checkpoint was changed under the same run id": (
        TROUBLE,
        "test_another_base_under_the_same_run_id_gets_a_name_of_its_own",
    ),
    "Weights were served that should not have been": (
        RUNS,
        "test_after_a_rollback_the_next_version_is_served_again",
    ),
}


def test_every_row_of_the_page_has_its_test() -> None:
    page = (ROOT / "docs/how-to/recover.md").read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"^\| (.+?) \|", page, re.MULTILINE) if row not in ("what fails", "---")]
    assert rows == list(ROWS)
    for file, name in ROWS.values():
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
