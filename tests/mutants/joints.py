"""Mistakes where right parts meet: rows and templates, trainer and planner, gates and answers."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        "a pair is padded as one sequence",
        "parallel/micro_batches.py",
        "[sum(slot_tokens(length, context) for length in unit) for unit in share]",
        "[slot_tokens(sum(unit), context) for unit in share]",
        "tests/parallel/test_batch.py"
        "::test_each_sequence_of_a_pair_is_padded_for_context_parallelism",
    ),
    Mutant(
        "an interleaved pipeline gets a part of a round",
        "parallel/micro_batches.py",
        "count += multiple",
        "count += 1",
        "tests/parallel/test_batch.py::test_an_interleaved_pipeline_gets_whole_rounds",
    ),
    Mutant(
        "a pair is planned as one sequence",
        "pipeline/estimate/stage_memory.py",
        "unit *= 2  # the two",
        "unit *= 1  # the two",
        "tests/pipeline/test_plan_memory.py::test_rows_are_planned_as_the_trainer_cuts_them",
    ),
    Mutant(
        "collected rows are planned at max_positions",
        "pipeline/estimate/stage_memory.py",
        "longest = min(longest, settings.engine.max_model_tokens)",
        "longest = settings.model.max_positions",
        "tests/pipeline/test_plan_memory.py::test_rows_are_planned_as_the_trainer_cuts_them",
    ),
    Mutant(
        "the response log is planned for one step",
        "pipeline/estimate/memory.py",
        "(step * loop.checkpoint_every, step, stage.name)",
        "(step * 1, step, stage.name)",
        "tests/pipeline/test_plan_memory.py"
        "::test_the_response_log_is_of_all_steps_until_a_checkpoint",
    ),
    Mutant(
        "a domain is checked with today's date",
        "stages/data/tokenizer.py",
        "tokenizer = _named(name, arguments, day)\n",
        "tokenizer = _named(name, arguments, None)\n",
        "tests/stages/test_domain_check.py::test_prompts_are_those_of_the_run_s_date_and_arguments",
    ),
    Mutant(
        "the role after an ended turn is learned",
        "stages/data/conversations.py",
        "upto = int(not ended and ends[:1] == [0])",
        "upto = int(ends[:1] == [0])",
        "tests/stages/test_conversations.py"
        "::test_the_role_after_a_turn_that_has_its_end_token_is_not_learned",
    ),
    Mutant(
        "a tool's description counts as its call",
        "stages/data/chat_template.py",
        "text.count(name) - without.count(name) < names.count(name)",
        "text.count(name) < names.count(name)",
        "tests/stages/test_conversations.py::test_a_call_that_only_the_tools_name_is_not_shown",
    ),
    Mutant(
        "the prompt's fence holds what follows thoughts",
        "stages/rewards/kinds/code.py",
        '"" if response.thoughts else problem.prompt',
        "problem.prompt",
        "tests/stages/test_thoughts.py"
        "::test_a_program_after_thoughts_is_not_in_the_fence_that_the_prompt_opens",
    ),
    Mutant(
        "a longer closing fence closes nothing",
        "stages/rewards/fences.py",
        'mark["mark"].startswith(fence.mark)',
        'mark["mark"] == fence.mark',
        "tests/stages/test_code_reward.py::test_the_program_is_the_last_fence_or_everything",
    ),
    Mutant(
        "a kept teacher's logits are rounded",
        "parallel/model/kept_logits.py",
        "head, logits.precise)",
        "head, False)",
        "tests/layouts/test_teachers.py::test_kept_logits_have_the_precision_of_their_head",
    ),
    Mutant(
        "another top_k leaves a gate as it is",
        "stages/kinds/evaluate/settings.py",
        '("temperature", "top_p", "top_k", "sampling_seed")',
        '("temperature", "top_p", "sampling_seed")',
        "tests/pipeline/test_gates.py::test_a_change_of_a_gate_touches_it_alone",
    ),
    Mutant(
        "a gate ignores a domain's greedy answers",
        "pipeline/config/rules.py",
        "coldest = min(run.answer_sampling(name).temperature for name in domains)",
        "coldest = run.evaluation.temperature",
        "tests/pipeline/test_rules.py::test_rules_between_blocks",
    ),
    Mutant(
        "the wrong beta is checked",
        "parallel/layout_rules.py",
        "return optimizer.betas[1] <= MOST_BF16_BETA2",
        "return optimizer.betas[0] <= MOST_BF16_BETA2",
        "tests/pipeline/test_rules.py::test_rules_between_blocks",
    ),
    Mutant(
        "a redacted report names files that are none",
        "pipeline/report/page/redaction.py",
        "if file and Path(file[1]).exists() else",
        "if file else",
        "tests/pipeline/test_report.py::test_a_damaged_file_is_named_and_nothing_after_it",
    ),
    Mutant(
        "oversampling goes unprobed",
        "stages/sampling/step.py",
        "rollout.max_steps_ahead > 0 or rollout.oversampling > 1",
        "rollout.max_steps_ahead > 0",
        "tests/stages/test_rollout_modes.py::test_groups_that_wait_for_a_later_step_need_probes",
    ),
    Mutant(
        "probes are whole responses",
        "stages/sampling/prompt_buffer.py",
        "limit = min(longest, self.sampling.max_response_tokens)",
        "limit = self.sampling.max_response_tokens",
        "tests/stages/test_backlog.py::test_probes_are_short",
    ),
    Mutant(
        "engines stop at the main end token alone",
        "stages/sampling/engines.py",
        "sampling.max_response_tokens, self.tokenizer.end_tokens",
        "sampling.max_response_tokens, (self.tokenizer.end_token,)",
        "tests/stages/test_end_tokens.py::test_engines_are_asked_to_stop_at_each_of_them",
    ),
    Mutant(
        "weights multiply the ratio's distance from pi_old",
        "stages/objectives/surrogate.py",
        "still = self.logprobs.detach()",
        "still = self.old_logprobs",
        "tests/stages/objectives/test_policy_loss.py::test_a_token_is_learned_by_its_own_weight",
    ),
    Mutant(
        "a correction weighs the KL",
        "stages/objectives/loss.py",
        "_penalty(tokens, settings.kl)\n",
        "_penalty(tokens.weighted(), settings.kl)\n",
        "tests/stages/objectives/test_policy_loss.py"
        "::test_corrections_change_the_policy_gradient_and_not_the_kl",
    ),
    Mutant(
        "thoughts end at the first marker",
        "stages/data/thoughts.py",
        ".rpartition(closing)",
        ".partition(closing)",
        "tests/stages/test_thoughts.py::test_thoughts_are_opened_by_the_prompt_or_the_response",
    ),
    Mutant(
        "a gate's other model has one answer a problem",
        "pipeline/run/gates.py",
        "Answers(other, gate.samples_per_problem)",
        "Answers(other)",
        "tests/pipeline/test_gates.py::test_a_gate_with_several_answers_counts_them_all",
    ),
    Mutant(
        "the simulation forgets pi_old's pass",
        "pipeline/estimate/simulation.py",
        "frozen += pi_old_passes(stage, settings, updates)",
        "frozen += 0",
        "tests/pipeline/test_simulate.py::test_pi_old_costs_a_pass_only_where_it_is_computed",
    ),
    Mutant(
        "one stray token counts in the mean",
        "parallel/mismatch.py",
        'metrics["mismatch_mean"] - largest / tokens',
        'metrics["mismatch_mean"]',
        "tests/parallel/test_mismatch.py"
        "::test_one_stray_token_among_few_probes_does_not_stop_a_stage",
    ),
    Mutant(
        "an export of several end tokens states none",
        "stages/kinds/export/work.py",
        "if stated is None and len(tokenizer.end_tokens) == 1:",
        "if stated is None:",
        "tests/stages/test_export.py::test_an_export_stops_where_the_policy_was_trained_to",
    ),
    Mutant(
        "the load balance divides by all layers",
        "stages/audit/update.py",
        "return total / total[0].sum()",
        "return total / total.sum()",
        "tests/audit/test_parts.py::test_the_routers_losses_are_those_of_the_papers",
    ),
    Mutant(
        "RSPO sums over layers and experts",
        "stages/audit/policy_step.py",
        "abs().mean((0, 2))",
        "abs().sum((0, 2))",
        "tests/audit/test_parts.py::test_routers_move_and_policies_differ_as_the_papers_say",
    ),
    Mutant(
        "a line that names the cluster counts as a job",
        "pipeline/slurm/queue.py",
        "if line not in clusters]",
        "]",
        "tests/pipeline/test_queued_jobs.py::test_squeue_may_name_the_cluster_and_lists_one",
    ),
    Mutant(
        "a row's tools are not in its key",
        "stages/data/problem.py",
        "    if not tools:\n        return key",
        "    if True:\n        return key",
        "tests/stages/test_rows_from_outside.py::test_a_question_with_other_tools_is_no_repetition",
    ),
    Mutant(
        "a damaged step counts as the first",
        "parallel/files.py",
        "        return math.inf\n    return step",
        "        return 0\n    return step",
        "tests/stages/test_metrics.py::test_resuming_drops_a_damaged_line_and_no_other",
    ),
    Mutant(
        "NaN in tool calls is trained on",
        "stages/data/messages.py",
        "allow_nan=False",
        "allow_nan=True",
        "tests/stages/test_rows_from_outside.py"
        "::test_what_cannot_be_learned_as_it_says_is_refused_with_its_line",
    ),
    Mutant(
        "a call written as text ends as a conversation",
        "stages/data/conversations.py",
        'role = "tool" if _calls_tools(messages[-1]) else "user"',
        'role = "tool" if messages[-1].get("tool_calls") else "user"',
        "tests/stages/test_conversations.py"
        "::test_glm_ends_a_turn_with_the_role_of_whoever_speaks_next",
    ),
    Mutant(
        "a model that thinks gets the room of others",
        "pipeline/new_run/run_blocks.py",
        "max(2 * length.value, LEAST_OF_THINKING)",
        "length.value",
        "tests/pipeline/test_init.py"
        "::test_a_model_that_thinks_has_the_room_of_the_shipped_runs_of_such_models",
    ),
    Mutant(
        "a long JSON number is rounded",
        "stages/data/row_forms.py",
        "json.JSONDecoder(parse_float=_number)",
        "json.JSONDecoder()",
        "tests/stages/test_mathematics.py::test_a_number_of_a_row_is_a_decimal",
    ),
    Mutant(
        "an unread file's class is the default one",
        "pipeline/config/validate.py",
        "if (complete or not _is_of_unread_file(root, tree, details))",
        'if (complete or details["type"] not in MISSING)',
        "tests/pipeline/test_config.py"
        "::test_a_missing_file_that_may_say_the_kind_of_a_block_is_the_only_error",
    ),
    Mutant(
        "rewards without references are said to be tested",
        "pipeline/commands/domain.py",
        '[] if has_references(findings["prompts"]) else [name]',
        "[]",
        "tests/pipeline/test_domain_commands.py"
        "::test_rewards_without_reference_answers_are_untested_and_lengths_are_in_characters",
    ),
    Mutant(
        "a turn that the template leaves open is not taught to end",
        "stages/data/conversations.py",
        "if following is not None and _ends(tokenizer, samples[-1][0][-1], following):",
        "if following is not None:",
        "tests/stages/test_real_tokenizers.py"
        "::test_deepseek_learns_to_end_a_turn_of_one_call_which_its_template_leaves_open",
    ),
    Mutant(
        "renamed work moves before the ledger has its names",
        "pipeline/run/former.py",
        """    for old, new in names.items():
        _record(run.ledger, old, new)
    # Directories move last: until then `former_names` finds what is left to do.
    for old, new in names.items():
        run.stage(old).path.rename(run.stage(new).path)
""",
        """    for old, new in names.items():
        run.stage(old).path.rename(run.stage(new).path)
    for old, new in names.items():
        _record(run.ledger, old, new)
""",
        "tests/pipeline/test_former.py::test_the_next_start_finishes_what_a_kill_cut_short",
    ),
    Mutant(
        "work is moved while a stage that compares with it runs",
        "pipeline/run/former.py",
        "for name in stage_paths(run):",
        "for name in names:",
        "tests/pipeline/test_former.py::test_a_running_stage_is_not_moved",
    ),
    Mutant(
        "a renamed stage that ran again is known by its second name",
        "pipeline/run/lineage.py",
        "return (manifest.seeded_as or manifest.stage) if manifest else None",
        "return manifest.stage if manifest else None",
        "tests/pipeline/test_former.py::test_a_renamed_stage_repeats_its_random_numbers",
    ),
    Mutant(
        "a setting that was not recorded is no difference",
        "stages/keys.py",
        "dict.fromkeys([*before, *after])",
        "dict.fromkeys(before)",
        "tests/pipeline/test_states.py::test_a_manifest_with_keys_of_an_earlier_form_is_stale",
    ),
    Mutant(
        "two steps ahead are collected before the weight sync",
        "stages/domains.py",
        "return self.max_steps_ahead == 1 and",
        "return self.max_steps_ahead >= 1 and",
        "tests/pipeline/test_rules.py::test_modes_of_earlier_versions_are_read_as_steps_ahead",
    ),
    Mutant(
        "a misspelt command has no others to be compared with",
        "pipeline/commands/support/registry.py",
        "[word] if word in files else files",
        "[word] if word in files else []",
        "tests/pipeline/test_command_files.py::test_the_first_word_s_command_is_imported_alone",
    ),
]
