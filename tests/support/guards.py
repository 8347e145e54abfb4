"""Guards of the package, each with a change that removes it and the test that must notice.

Where a guard moves or changes, so does its entry; `test_guards.py` says which do not fit.
"""

from typing import NamedTuple


class Guard(NamedTuple):
    file: str  # in podracer/
    line: str  # or a part that occurs once in the file
    without: str  # what stands there when the guard is removed
    test: str  # in tests/
    mark: str = "not slow"  # of the cases that are tried


GUARDS = [
    # --- sealed directories, names and locks ---
    Guard(
        "io/seal.py",
        'listed[name]["sha256"] != file_digest(directory / name)',
        "False",
        "io/test_run_directory.py::test_any_flipped_bit_breaks_a_seal",
    ),
    Guard(
        "io/seal.py",
        'if manifest["name"] != directory.name:',
        "if False:",
        "io/test_checkpoint.py::test_hostile_content_is_quarantined_and_never_followed",
    ),
    Guard(
        "io/seal.py",
        "elif not stat.S_ISDIR(status.st_mode)",
        "elif False",
        "io/test_checkpoint.py::test_hostile_content_is_quarantined_and_never_followed",
    ),
    Guard(
        "io/seal.py",
        "file_digest(directory / path, sync=True)",
        "file_digest(directory / path)",
        "io/test_run_directory.py::test_a_seal_syncs_every_file_before_the_manifest",
    ),
    Guard(
        "io/run_directory.py",
        "not _NAME.fullmatch(name)",
        "not _NAME.match(name)",
        "io/test_run_directory.py::test_unusable_names_say_what_would_be_right",
    ),
    Guard(
        "io/run_directory.py",
        "if path.is_symlink() or path.resolve().parent != root:",
        "if False:",
        "io/test_run_directory.py::test_links_and_files_are_not_run_directories",
    ),
    Guard(
        "io/run_directory.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "io/test_run_directory.py::test_one_process_cannot_run_twice_in_one_directory",
    ),
    Guard(
        "io/run_directory.py",
        "self._take(descriptor)\n            self._check()",
        "self._take(descriptor)",
        "io/test_directory_claims.py::test_what_another_process_began_before_the_lock_is_left_as_it_is",
    ),
    Guard(
        "io/processes.py",
        "ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)",
        "pass",
        "envs/host/test_gymnasium.py::test_processes_in_sessions_of_their_own_end_with_the_run",
    ),
    Guard(
        "io/run_directory.py",
        "if free < size + SPARE_BYTES:",
        "if False:",
        "io/test_paths.py::test_a_directory_that_cannot_be_saved_to_is_refused_before_a_compile",
    ),
    Guard(
        "io/paths.py",
        "if not _is_utf8(full):",
        "if False:",
        "io/test_paths.py::test_a_path_that_is_not_utf8_is_refused_before_anything_is_made",
    ),
    Guard(
        "io/paths.py",
        "if _ADDRESS.match(text):",
        "if False:",
        "io/test_paths.py::test_no_function_takes_an_address_for_a_path",
    ),
    Guard(
        "io/reading.py",
        "return file.read(size)",
        "return file.read()",
        "io/test_reading.py::test_what_is_no_file_is_refused",
    ),
    Guard(
        "io/steps.py",
        "if type(step) is not int or not 0 <= step < 10**12:",
        "if False:",
        "io/test_reading.py::test_a_newest_step_that_is_none_is_refused",
    ),
    Guard(
        "io/run_directory.py",
        "os.replace(draft, path)",
        "path.write_bytes(data)",
        "io/test_run_directory.py::test_json_is_replaced_whole_and_synced_before_it_is_named",
    ),
    # --- checkpoints ---
    Guard(
        "io/checkpoint.py",
        "if stored != expected:",
        "if False:",
        "io/test_checkpoint.py::test_a_state_that_does_not_fit_is_refused_with_the_difference",
    ),
    Guard(
        "io/checkpoint.py",
        "if schema(state) != expected:",
        "if False:",
        "io/test_checkpoint.py::test_a_dtype_that_jax_would_narrow_is_refused",
    ),
    Guard(
        "io/steps.py",
        'if meta["format"] != FORMAT:',
        "if False:",
        "io/test_checkpoint.py::test_a_forged_schema_is_refused_before_anything_is_read",
    ),
    Guard(
        "io/arrays.py",
        "and size > MEMORY_BYTES",
        "and False",
        "io/test_checkpoint.py::test_arrays_beyond_memory_are_refused_before_they_are_read",
    ),
    Guard(
        "io/checkpoint.py",
        "path.rename(path.with_suffix(_REMOVED))",
        "path",
        "io/test_checkpoint.py::test_a_deletion_cut_short_leaves_debris_and_not_a_damaged_step",
    ),
    Guard(
        "io/steps.py",
        "if owner != identity:",
        "if False:",
        "io/test_checkpoint.py::test_a_checkpoint_of_another_run_is_refused_wherever_it_is_opened",
    ),
    Guard(
        "io/seal.py",
        "if encode_sealed(body) != raw:",
        "if False:",
        "io/test_checkpoint.py::test_a_run_keeps_no_checkpoint_without_its_configuration",
    ),
    Guard(
        "io/checkpoint.py",
        "return bool(remains) or newest_saved(self.run) is not None",
        "return bool(remains)",
        "io/test_checkpoint.py::test_lost_checkpoints_are_not_taken_for_a_run_that_saved_none",
    ),
    Guard(
        "io/steps.py",
        "if valid and newest_path and newest_path > valid and newest_path not in refused:",
        "if False:",
        "io/test_checkpoint.py::test_a_fall_back_is_said",
    ),
    Guard(
        "io/seal.py",
        "if error.errno not in _IS_ABSENT:",
        "if False:",
        "io/test_checkpoint.py::test_an_error_of_reading_is_no_damage",
    ),
    Guard(
        "io/run_directory.py",
        "if stat.S_ISDIR(status.st_mode):",
        "if True:",
        "io/test_checkpoint.py::test_links_are_not_followed_for_writing_or_deleting",
    ),
    Guard(
        "io/checkpoint.py",
        "if inode != self._inode:",
        "if False:",
        "io/test_checkpoint.py::test_a_directory_that_vanishes_under_a_run_ends_it",
    ),
    Guard(
        "io/checkpoint.py",
        " if self._is_own(path)]",
        "]",
        "io/test_checkpoint.py::test_retention_deletes_no_checkpoint_of_another_run",
    ),
    Guard(
        "io/checkpoint.py",
        "old = [path for path in old if int(path.name) not in best.values()]",
        "",
        "io/test_checkpoint.py::test_the_best_step_is_kept_as_long_as_a_step_names_it",
    ),
    Guard(
        "run/resume.py",
        "return len(saves) > 1",
        "return False",
        "run/test_training.py::test_a_run_that_lost_its_checkpoints_does_not_begin_again",
    ),
    # --- records and what leaves the process ---
    Guard(
        "io/jsonl.py",
        "is_whole = holds_sealed(data, sealed)",
        "is_whole = True",
        "io/test_sinks.py::test_records_that_are_not_those_of_the_checkpoint_are_said_and_kept",
    ),
    Guard(
        "io/jsonl.py",
        "if updates is None or updates <= self._updates:",
        "if False:",
        "io/test_sinks.py::test_jsonl_refuses_a_step_back",
    ),
    Guard(
        "io/jsonl.py",
        "last < count <= updates",
        "last < count",
        "io/test_sinks.py::test_resume_keeps_what_the_checkpoint_knows_and_goes_on",
    ),
    Guard(
        "io/sinks.py",
        "deque(maxlen=queue_size)",
        "deque()",
        "io/test_sinks.py::test_a_slow_sink_drops_its_oldest_records_and_delays_nobody",
    ),
    Guard(
        "io/sinks.py",
        "self._thread.join(max(0.0, deadline - time.monotonic()))",
        "self._thread.join()",
        "io/test_sinks.py::test_a_sink_that_never_returns_is_left_behind",
    ),
    Guard(
        "io/crash.py",
        "return redact(str(value))",
        "return str(value)",
        "io/test_crash.py::test_no_value_of_a_variable_reaches_a_crash",
    ),
    Guard(
        "io/text.py",
        "return _CONTROL.sub(",
        "return text or _CONTROL.sub(",
        "io/test_crash.py::test_control_characters_are_spelled_out",
    ),
    # --- configurations ---
    Guard(
        "fields.py",
        "if not abs(value) <= float(np.finfo(np.float32).max):",
        "if False:",
        "run/test_training.py::test_impossible_values_are_refused_before_anything_is_made",
    ),
    Guard(
        "config/serialization.py",
        "not fits(values[name], hints[name])",
        "False",
        "run/test_training.py::test_a_configuration_cannot_name_what_it_likes",
    ),
    Guard(
        "run/resume.py",
        "if name not in FREE_ON_RESUME",
        "if False",
        "run/test_training.py::test_another_configuration_is_refused_with_the_difference",
    ),
    Guard(
        "run/claim.py",
        "if exists and not resume:",
        "if False:",
        "run/test_training.py::test_a_directory_is_used_once",
    ),
    Guard(
        "run/claim.py",
        "if not resume and records:",
        "if False:",
        "run/test_training.py::test_records_of_another_run_are_refused_and_left_as_they_are",
    ),
    Guard(
        "checks/environment.py",
        "spec.shape != leaf.shape or spec.dtype != leaf.dtype",
        "False",
        "checks/test_check_environment.py::test_a_broken_environment_is_refused_without_a_compile",
    ),
    Guard(
        "checks/environment.py",
        "with jax.checking_leaks():",
        "if True:",
        "checks/test_check_environment.py::test_a_broken_environment_is_refused_without_a_compile",
    ),
    Guard(
        "checks/environment.py",
        "jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)",
        "False",
        "checks/test_check_environment.py::test_a_broken_environment_is_refused_without_a_compile",
    ),
    Guard(
        "io/npz.py",
        "dtype != expected_dtype or size > _LIMIT or wrong_shape",
        "wrong_shape",
        "agents/rules/test_rule_file.py",
    ),
    # --- values that are not finite ---
    Guard(
        "drivers/common.py",
        "lambda new, old: jnp.where(is_applied, new, old)",
        "lambda new, old: new",
        "drivers/test_population.py::test_a_pod_that_diverges_harms_no_other",
    ),
    Guard(
        "drivers/common.py",
        '(Fault.REWARD, "reward", reward),',
        '(Fault.REWARD, "reward", ()),',
        "drivers/test_anakin.py::test_bad_data_stops_the_run_before_it_is_applied",
    ),
    Guard(
        "drivers/common.py",
        "jnp.all(trajectory.next_timesteps().first | trajectory.valid())",
        "jnp.bool_(True)",
        "drivers/test_anakin.py::test_an_environment_that_does_not_restart_is_named",
    ),
    Guard(
        "drivers/sebulba/validator.py",
        "not_finite = ~np.logical_and.reduce(finite)",
        "not_finite = np.zeros(self._num_envs, bool)",
        "drivers/sebulba/test_sebulba.py::test_bad_rows_are_counted_and_never_train",
    ),
    Guard(
        "drivers/sebulba/validator.py",
        "(self._masked_rows & ~timestep.first) | bad_rows",
        "bad_rows",
        "drivers/sebulba/test_sebulba.py::test_the_broken_episode_is_cut_and_the_others_are_undisturbed",
    ),
    # --- threads and queues ---
    Guard(
        "drivers/sebulba/supervisor.py",
        "is_first = not self._stopping and self._fault is None",
        "is_first = True",
        "drivers/sebulba/test_sebulba_faults.py::test_the_first_fault_counts_even_if_closing_fails_too",
    ),
    Guard(
        "drivers/sebulba/supervisor.py",
        "except BaseException as error:",
        "except Exception as error:",
        "drivers/sebulba/test_sebulba_faults.py::test_a_thread_that_leaves_python_is_a_fault",
    ),
    Guard(
        "environment.py",
        "except BaseException as error:  # `sys.exit(0)`",
        "except Exception as error:  # `sys.exit(0)`",
        "drivers/sebulba/test_sebulba_faults.py::test_an_environment_that_leaves_python_does_not_end_the_run_well",
    ),
    Guard(
        "drivers/sebulba/queue.py",
        "while len(self._items) >= self._depth:",
        "while False:",
        "drivers/sebulba/test_queue.py::test_put_waits_for_room",
    ),
    Guard(
        "drivers/sebulba/queue.py",
        "        self.check_open()\n        self._items.append(item)",
        "        self._items.append(item)",
        "drivers/sebulba/test_queue.py::test_after_closing_everything_is_closed",
    ),
    Guard(
        "drivers/sebulba/queue.py",
        "            self._changed.notify_all()\n            return self._items.popleft()",
        "            return self._items.popleft()",
        "drivers/sebulba/test_queue.py::test_put_waits_for_room",
    ),
    Guard(
        "drivers/sebulba/queue.py",
        "            self._changed.notify_all()\n\n    def __len__",
        "            pass\n\n    def __len__",
        "drivers/sebulba/test_queue.py::test_no_order_of_events_hangs",
    ),
    # --- environments in processes ---
    Guard(
        "envs/host/gymnasium_worker.py",
        "if not np.isfinite(self.shared.reward[start:end]).all():",
        "if False:",
        "envs/host/test_gymnasium.py::test_a_row_at_fault_begins_anew_alone",
    ),
    Guard(
        "envs/host/gymnasium_worker.py",
        "elif leaf.low is not None and not",
        "elif False and not",
        "envs/host/test_gymnasium.py::test_a_row_at_fault_begins_anew_alone",
    ),
    Guard(
        "envs/host/gymnasium_worker.py",
        "if isinstance(error, KeyboardInterrupt) and not inside_worker:",
        "if False:",
        "envs/host/test_gymnasium.py::test_ctrl_c_while_an_environment_steps_in_this_process_is_no_fault_of_it",
    ),
    Guard(
        "envs/host/gymnasium_worker.py",
        "request_signal_at_parent_death(signal.SIGKILL)",
        "pass",
        "envs/host/test_gymnasium.py::test_the_fork_server_is_replaced_too",
    ),
    Guard(
        "envs/host/gymnasium.py",
        "if shared.consecutive_failures[row] >= limit:",
        "if False:",
        "envs/host/test_gymnasium.py::test_too_many_faults_end_the_run",
    ),
    Guard(
        "envs/host/gymnasium_worker.py",
        "if text := describe_lost_change(name, previous, value):",
        "if text := None:",
        "envs/host/test_gymnasium.py::test_float64_numbers_that_float32_cannot_tell_apart_are_refused",
    ),
    Guard(
        "run/blueprint.py",
        "    check_jax_settings()",
        "    pass",
        "checks/test_check_environment.py::test_settings_of_jax_that_exclude_the_programs_are_refused",
    ),
    Guard(
        "envs/host/gymnasium.py",
        "elif sum(counts) > self._max_restarts:",
        "elif False:",
        "envs/host/test_gymnasium.py::test_too_many_faults_end_the_run",
    ),
    Guard(
        "envs/host/gymnasium.py",
        "if gymnasium_worker.inside_worker:",
        "if False:",
        "envs/host/test_gymnasium.py::test_a_script_without_a_guard_is_told_so",
    ),
    Guard(
        "config/serialization.py",
        "isinstance(environment, str) and (module := imported_module(environment))",
        "(module := None)",
        "envs/host/test_gymnasium.py::test_no_file_has_a_module_imported",
    ),
    # --- several processes ---
    Guard(
        "devices/peers.py",
        "coordinator_bind_address=bind_address,",
        "",
        "devices/test_hosts.py::test_the_loss_of_a_process_ends_the_other_with_77",
        "slow",
    ),
    # --- reductions over devices ---
    Guard(
        "drivers/anakin.py",
        "in_order(lambda agent, *args: chunk(agent, env, config, axis, *args), mesh)",
        "lambda agent, *args: chunk(agent, env, config, axis, *args)",
        "devices/test_reductions.py::test_a_chunk_of_anakin_is_ordered_and_would_not_be_by_itself",
    ),
    Guard(
        "drivers/sebulba/update.py",
        "in_order(program, mesh)",
        "program",
        "devices/test_reductions.py::test_an_update_of_sebulba_is_ordered_and_would_not_be_by_itself",
    ),
    Guard(
        "devices/ordering.py",
        "token & (first != 0)",
        "token",
        "devices/test_reductions.py::test_reductions_wait_for_each_other_wherever_they_are",
    ),
    # --- tournaments ---
    Guard(
        "tournament/index.py",
        "if events and checksums[events - 1 : events] != [checksum]:",
        "if False:",
        "tournament/test_leaderboard.py::test_a_log_that_was_cut_is_refused_at_every_place",
    ),
    Guard(
        "tournament/leaderboard.py",
        "current is None or (current.round, current.token) != (report.round, report.token)",
        "current is None",
        "tournament/test_leaderboard.py::test_zombies_are_fenced",
    ),
    Guard(
        "tournament/leaderboard.py",
        "math.isfinite(report.score) and math.isfinite(report.standard_error)",
        "True",
        "tournament/test_leaderboard.py::test_what_cannot_be_ranked_is_rejected",
    ),
    Guard(
        "tournament/leaderboard.py",
        "if line != expected:",
        "if False:",
        "tournament/test_leaderboard.py::test_damage_is_refused_with_its_line",
    ),
    Guard(
        "tournament/leaderboard.py",
        "os.fsync(self._file.fileno())",
        "pass",
        "tournament/test_leaderboard.py::test_what_is_acknowledged_is_synced_first",
    ),
    Guard(
        "io/jsonl.py",
        "os.fsync(self._file.fileno())",
        "pass",
        "io/test_sinks.py::test_what_a_checkpoint_seals_is_durable",
    ),
    Guard(
        "tournament/leaderboard.py",
        "and path.resolve() == path",
        "",
        "tournament/test_leaderboard.py::test_garbage_is_never_collected_through_a_link",
    ),
    Guard(
        "tournament/pod.py",
        "if digest(path) != parent.digest:",
        "if False:",
        "tournament/test_pods.py::test_a_checkpoint_that_is_not_the_recorded_one_is_refused",
    ),
    Guard(
        "tournament/report.py",
        "if damaged := unsound_fields(report, _SCHEMA):",
        "if damaged := []:",
        "tournament/test_orchestrator.py::test_a_damaged_report_costs_its_attempt_alone",
    ),
    Guard(
        "evaluate.py",
        "if played.stuck.any():",
        "if False:",
        "test_evaluate.py::test_an_episode_in_which_no_action_is_allowed_is_refused",
    ),
    Guard(
        "agents/rules/lpg/student.py",
        "check_digest(content, self.rule_digest, self.rule_file)",
        "pass",
        "agents/rules/test_lpg.py::test_a_run_under_a_rule_keeps_the_digest_of_its_file",
    ),
    Guard(
        "tournament/leaderboard.py",
        "or round < pod_state.round:",
        "or False:",
        "tournament/test_leaderboard.py::test_rounds_may_be_skipped_but_not_repeated",
    ),
    Guard(
        "tournament/leaderboard.py",
        "if pairs != [(player, opponent) for opponent in opponents]:",
        "if False:",
        "tournament/test_league.py::test_a_report_of_other_matches_is_refused",
    ),
    Guard(
        "tournament/capacity.py",
        "_NUMBER.fullmatch(text)",
        "_NUMBER.match(text)",
        "tournament/test_orchestrator.py::test_a_capacity_that_is_no_number_is_ignored_with_a_sentence",
    ),
    Guard(
        "tournament/pod.py",
        "jax.random.fold_in(purpose_key(run_key, Purpose.START_ROUND), round)",
        "jax.random.fold_in(purpose_key(run_key, Purpose.SELECT), round)",
        "tournament/test_pods.py::test_the_key_of_a_round_is_no_other_key_of_its_run",
    ),
    # --- configurations, evaluations and faults ---
    Guard(
        "drivers/sebulba/learner.py",
        "had_new_faults = self._faulty_steps > 0",
        "had_new_faults = True",
        "drivers/sebulba/test_sebulba.py::test_faults_now_and_then_in_a_long_episode_end_no_run",
    ),
    Guard(
        "drivers/sebulba/learner.py",
        "if progress.frames or not has_new_faults:",
        "if progress.frames:",
        "drivers/sebulba/test_sebulba.py::test_faults_now_and_then_in_a_long_episode_end_no_run",
    ),
    Guard(
        "drivers/sebulba/learner.py",
        "if (had_new_faults and self._faulty_steps >= EMPTY_STEPS) or never_ends:",
        "if never_ends:",
        "drivers/sebulba/test_sebulba.py::test_a_run_without_a_valid_step_ends_with_its_fault",
    ),
    Guard(
        "config/field_types.py",
        "descends = descends or bool(jnp.all(update < 0))",
        "pass",
        "config/test_field_types.py::test_an_optimizer_that_warms_up_is_refused_by_its_next_updates",
    ),
    Guard(
        "config/field_types.py",
        "if hint is OptimizerBuilder and not isinstance(value, Optimizer):",
        "if hint is OptimizerBuilder:",
        "config/test_field_types.py::test_the_optimizers_of_the_library_are_not_tried",
    ),
    Guard(
        "config/field_types.py",
        "if jax.tree_util.all_leaves([optimizer]):",
        "if False:",
        "config/test_field_types.py::test_a_value_of_the_wrong_type_is_answered_with_what_to_write",
    ),
    Guard(
        "run/records.py",
        "np.where(evaluation.unfinished, -np.inf, evaluation.returns.mean(axis=-1))",
        "evaluation.returns.mean(axis=-1)",
        "test_evaluate.py::test_the_best_pod_is_one_whose_episodes_ended",
    ),
    Guard(
        "scores/score.py",
        'returns[np.asarray(record.get("evaluation_unfinished", 0)) > 0] = np.nan',
        "pass",
        "drivers/test_population.py::test_a_pod_whose_evaluation_did_not_end_is_never_the_best",
    ),
    Guard(
        "scores/score.py",
        "    if has_diverged:\n",
        "    if False:\n",
        "scores/test_scores.py::test_a_final_score_is_that_of_the_last_evaluation_or_there_is_none",
    ),
    Guard(
        "scores/seeds.py",
        "if original := of_identity.get(identity):",
        "if original := None:",
        "scores/test_scores.py::test_a_copy_under_another_seed_is_no_seed",
    ),
    Guard(
        "scores/seeds.py",
        "elif original := of_seed.get(run.seed):",
        "elif original := None:",
        "scores/test_scores.py::test_all_outputs_say_the_same_scores_counts_and_intervals",
    ),
    Guard(
        "io/edits.py",
        "if not holds_sealed(content, seal):",
        "if False:",
        "scores/test_scores.py::test_files_that_were_changed_are_named",
    ),
    Guard(
        "io/edits.py",
        "return encode_sealed(body) == raw",
        "return True",
        "scores/test_scores.py::test_files_that_were_changed_are_named",
    ),
    Guard(
        "run/sweep.py",
        "if np.isnan(returns).all():",
        "if False:",
        "drivers/test_population.py::test_a_pod_whose_evaluation_did_not_end_is_never_the_best",
    ),
    Guard(
        "run/sweep.py",
        "if not winner.score.is_whole:",
        "if False:",
        "drivers/test_population.py::test_a_pod_whose_evaluation_did_not_end_is_never_the_best",
    ),
    Guard(
        "run/records.py",
        'progress.pods["evaluation_unfinished"] = evaluation.unfinished',
        "pass",
        "test_evaluate.py::test_the_best_pod_is_one_whose_episodes_ended",
    ),
    Guard(
        "tournament/pod.py",
        "if evaluation.broken:",
        "if False:",
        "tournament/test_pods.py::test_episodes_that_faults_kept_from_ending_give_no_score",
    ),
    Guard(
        "checks/agent.py",
        "    if different:\n",
        "    if False:\n",
        "checks/test_check_agent.py::test_learners_that_would_drift_apart_are_refused",
    ),
    Guard(
        "io/steps.py",
        "    check_promoted(run)\n",
        "",
        "trading/test_trading_delivery.py::test_nobody_reads_a_model_that_was_exchanged",
    ),
    Guard(
        "serve/service.py",
        "(decision.model, decision.files, marks_of(path))",
        "decision.model",
        "serve/test_serve.py::test_a_directory_of_models_is_known_by_more_than_its_numbers",
    ),
    Guard(
        "run/training.py",
        '"experiment": redact_settings(self.settings),',
        '"experiment": self.settings,',
        "io/test_secrets.py::test_only_the_configuration_of_a_run_holds_its_secrets",
    ),
    Guard(
        "run/blueprint.py",
        "    remember_secrets(to_json(experiment))\n",
        "",
        "io/test_secrets.py::test_an_error_that_quotes_a_secret_is_written_without_it",
    ),
    Guard(
        "devices/peers.py",
        "        if error.errno == errno.EADDRINUSE:\n",
        "        if False:\n",
        "devices/test_hosts.py::test_a_number_that_is_taken_is_refused_before_it_joins",
    ),
    # --- pages ---
    Guard(
        "reports/page.py",
        "<{tag}{attributes}>{html.escape(value)}</{tag}>",
        "<{tag}{attributes}>{value}</{tag}>",
        "reports/test_report.py::test_a_report_is_self_contained_and_runs_nothing",
    ),
    Guard(
        "reports/watch/server.py",
        "return self.server.names is None or host_in(self._host) in self.server.names",
        "return True",
        "reports/test_watch.py::test_no_request_reaches_another_file",
    ),
    Guard(
        "reports/watch/server.py",
        "        elif self._is_of_another_site():\n",
        "        elif False:\n",
        "reports/test_watch.py::test_other_sites_reach_nothing",
    ),
    Guard(
        "io/edits.py",
        "os.O_RDONLY | os.O_NOFOLLOW |",
        "os.O_RDONLY |",
        "reports/test_watch.py::test_only_regular_files_are_read",
    ),
    Guard(
        "reports/watch/chart.py",
        'class="title">{html.escape(title)}</text>',
        'class="title">{title}</text>',
        "reports/test_watch.py::test_nothing_that_a_file_says_is_run_or_ends_the_page",
    ),
    Guard(
        "reports/run.py",
        "text = {key: html.escape(str(value)) for",
        "text = {key: str(value) for",
        "reports/test_report.py::test_a_report_is_self_contained_and_runs_nothing",
    ),
    # --- processes that share a run ---
    Guard(
        "run/errors.py",
        "jax.errors.JaxRuntimeError | ValueError",
        "jax.errors.JaxRuntimeError",
        "devices/test_hosts.py::test_processes_that_cannot_talk_have_lost_one",
    ),
    Guard(
        "io/checkpoint.py",
        "    if isinstance(error, TimeoutError) and isinstance(",
        "    if False and isinstance(",
        "devices/test_hosts.py::test_a_process_that_is_lost_during_a_save_is_not_a_file_that_cannot_be_written",
    ),
]
