"""Mistakes where Braid meets the outside: tokenizers, rows, answers, other users' files, GPUs."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        "a loss that nobody reads is made on the CPU",
        "parallel/model/policy.py",
        "self._run(batches, lambda _: (torch.zeros((), device=device()), None))",
        "self._run(batches, lambda _: (torch.zeros(()), None))",
        "tests/layouts/test_fake_gpu.py",
    ),
    Mutant(
        "token weights multiply the value alone",
        "stages/objectives/loss.py",
        "(tokens.weighted(), settings.ratio)",
        "(tokens, settings.ratio)",
        "tests/stages/objectives/test_policy_loss.py"
        "::test_the_engines_bias_is_corrected_or_refused",
    ),
    Mutant(
        "a correction weighs a response's tokens by their mean",
        "stages/objectives/surrogate.py",
        "logprobs=still + self.weights * (self.logprobs - still)",
        "logprobs=still + self.weights.mean(-1, True) * (self.logprobs - still)",
        "tests/audit/test_formulas.py::test_corrections",
    ),
    Mutant(
        "a batch baseline's groups are judged alone",
        "stages/objectives/groups.py",
        "if settings.zero_variance_teaches:",
        'if settings.baseline == "critic":',
        "tests/stages/test_expert.py::test_a_batch_baseline_learns_from_zero_variance_groups",
    ),
    Mutant(
        "the entropy bonus is paid for ids that cannot be sampled",
        "parallel/batch.py",
        "vocabulary.entropy(self.logits, temperature, self.sampled_from)",
        "vocabulary.entropy(self.logits, temperature)",
        "tests/stages/test_kept_limits.py"
        "::test_entropies_and_kl_are_of_the_distribution_that_sampled",
    ),
    Mutant(
        "the planner forgets context parallelism",
        "parallel/micro_batches.py",
        "max(int(DEALING * device_tokens * context),",
        "max(int(DEALING * device_tokens),",
        "tests/pipeline/test_plan_memory.py::test_rows_are_planned_as_the_trainer_cuts_them",
    ),
    Mutant(
        "rows may be twice their bound",
        "parallel/micro_batches.py",
        ") > limit",
        ") > 2 * limit",
        "tests/parallel/test_batch.py::test_no_row_is_longer_than_planned",
    ),
    Mutant(
        "a domain's evaluation is ignored",
        "stages/settings.py",
        "getattr(common if getattr(overrides, key) is None else overrides, key)",
        "getattr(common, key)",
        "tests/stages/test_evaluate.py::test_answers_are_sampled_as_the_run_or_the_domain_says",
    ),
    Mutant(
        "a response may continue after a further end token",
        "parallel/engine/wire.py",
        "ends = np.isin(tokens, request.sampling.end_tokens)",
        "ends = tokens == request.sampling.end_tokens[0]",
        "tests/parallel/test_scheduler.py::test_an_invalid_response_is_refused_with_the_reason",
    ),
    Mutant(
        "rewards read further end tokens",
        "stages/data/tokenizer.py",
        "takewhile(lambda i: i not in self.end_tokens, map(int, ids))",
        "takewhile(lambda i: i != self.end_token, map(int, ids))",
        "tests/stages/test_end_tokens.py::test_a_reward_reads_no_end_token_of_any_kind",
    ),
    Mutant(
        "GLM's last turn ends with endoftext",
        "stages/data/conversations.py",
        "ids.append(closing_token(tokenizer, answered))",
        "ids.append(tokenizer.end_token)",
        "tests/stages/test_conversations.py"
        "::test_glm_ends_a_turn_with_the_role_of_whoever_speaks_next",
    ),
    Mutant(
        "an export lacks num_experts",
        "parallel/hugging_face/portable.py",
        'return {**renamed, "rope_scaling"',
        'return {"rope_scaling"',
        "tests/stages/test_export.py::test_transformers_4_57_finds_every_key_that_it_reads",
    ),
    Mutant(
        "turns are joined after a prompt that the template has rewritten",
        "stages/data/conversations.py",
        "if samples and prompt.startswith(text) else None",
        "if samples else None",
        "tests/stages/test_conversations.py"
        "::test_a_template_that_rewrites_earlier_turns_gives_each_turn_its_own_prompt",
    ),
    Mutant(
        "the tools of a pair are not shown",
        "stages/kinds/dpo/pairs.py",
        "Pair(prompt, chosen, rejected, tools)",
        "Pair(prompt, chosen, rejected)",
        "tests/stages/test_rows_from_outside.py::test_prompts_and_pairs_show_their_tools",
    ),
    Mutant(
        "a resumed run takes today's date",
        "pipeline/run/select.py",
        "        day = _recorded_date(run)\n",
        "        day = date.today()\n",
        "tests/pipeline/test_chat_template_settings.py"
        "::test_the_date_of_the_first_start_is_kept_and_read",
    ),
    Mutant(
        "a prompt that ends with <think> opens nothing",
        "stages/data/thoughts.py",
        "return prompt.rstrip().endswith(opening)",
        "return False",
        "tests/stages/test_thoughts.py"
        "::test_every_reward_of_an_answer_scores_what_follows_the_thoughts",
    ),
    Mutant(
        "small numbers are rounded to 0",
        "stages/rewards/mathematics.py",
        "    return _have_near(values, answers) and _have_near(answers, values)",
        "    return True",
        "tests/stages/test_mathematics.py::test_answers_are_equal_by_value",
    ),
    Mutant(
        "a reward's error keeps half a surrogate pair",
        "stages/rewards/reward.py",
        '    what = valid_text(what if len(what) <= LONGEST else f"{what[:LONGEST]}...")',
        '    what = what if len(what) <= LONGEST else f"{what[:LONGEST]}..."',
        "tests/stages/test_recording.py::test_an_error_of_a_reward_is_valid_text",
    ),
    Mutant(
        "files are opened through links",
        "parallel/files.py",
        "safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK",
        "safe = flags & ~os.O_TRUNC | os.O_NONBLOCK",
        "tests/pipeline/test_trust.py::test_a_link_in_a_run_of_ones_own_is_not_written_through",
    ),
    Mutant(
        "another user's unpacked bundle is run",
        "pipeline/run/archive.py",
        "        if status.st_uid not in (os.geteuid(), ROOT):",
        "        if False:",
        "tests/pipeline/test_archives.py"
        "::test_a_directory_that_another_user_put_beside_an_archive_is_refused",
    ),
    Mutant(
        "a launcher that was stopped itself blames its ranks",
        "pipeline/launch/heartbeats.py",
        "if paused or rank not in",
        "if rank not in",
        "tests/pipeline/test_launcher.py::test_a_launcher_that_was_stopped_itself_blames_nobody",
    ),
    Mutant(
        "a redacted report keeps problems' keys",
        "pipeline/report/page/redaction.py",
        "return [self._problems.setdefault(key, str(len(self._problems))) for key in value]",
        "return list(value)",
        "tests/pipeline/test_report.py::test_problems_of_a_redacted_report_are_numbered",
    ),
    Mutant(
        "a run-length encoded list is decoded whatever its length",
        "parallel/parquet_files.py",
        "values > MOST_REPEATED * size + FREE_BYTES",
        "values < 0",
        "tests/parallel/test_parquet_files.py::test_a_list_whose_length_is_encoded_is_refused",
    ),
    Mutant(
        "an fp32 model's head is overridden too",
        "parallel/engine/arguments.py",
        "if job.model.precise_head:",
        'if job.model.head_precision == "fp32":',
        "tests/engine/test_arguments.py::test_only_an_fp32_head_of_a_bf16_model_overrides_vllm_s",
    ),
    Mutant(
        "latent attention of any width is admitted on a CPU",
        "parallel/engine/platform.py",
        "if widths != LATENT_WIDTHS:",
        "if sum(widths) > sum(LATENT_WIDTHS):",
        "tests/engine/test_cpu_limits.py::test_latent_attention_needs_the_published_widths",
    ),
    Mutant(
        "latent attention takes vLLM's rotary kernel for CPUs",
        "parallel/engine/arguments.py",
        '"compilation_config": TORCH_ROTATES,',
        '"compilation_config": {},',
        "tests/engine/test_families.py",
    ),
    Mutant(
        "the warning ignores the chance of a small sample",
        "parallel/mismatch.py",
        "if not _more_than_chance(share, WARNED_SHARE, tokens):",
        "if not share > WARNED_SHARE:",
        "tests/parallel/test_mismatch.py"
        "::test_a_share_that_stops_nothing_is_a_warning_from_one_in_a_thousand",
    ),
    Mutant(
        "a rise that is not significant is called learning",
        "pipeline/report/view/learning.py",
        "(self.rise.low > 0 if self.rises else self.rise.high < 0)",
        "(self.rise.high > 0 if self.rises else self.rise.low < 0)",
        "tests/pipeline/test_verdicts.py"
        "::test_a_gain_that_is_not_significant_is_never_called_healthy",
    ),
    Mutant(
        "a loss on another domain is never forgetting",
        "pipeline/report/compare/comparison.py",
        "if domain not in stage.domains and change.high < -FORGOTTEN:",
        "if domain in stage.domains and change.high < -FORGOTTEN:",
        "tests/pipeline/test_verdicts.py::test_gains_and_losses_are_those_of_compare",
    ),
    Mutant(
        "a reference's end token is not counted",
        "stages/domain_tools/response_lengths.py",
        "yield len(tokenizer.encode(text)) + 1",
        "yield len(tokenizer.encode(text))",
        "tests/stages/test_domain_check.py"
        "::test_references_are_measured_with_the_end_token_against_the_limit",
    ),
    Mutant(
        "a nested column is looked up in the row itself",
        "stages/data/columns.py",
        'for name in column.split("."):',
        "for name in [column]:",
        "tests/pipeline/test_init_data.py::test_domain_check_gives_the_columns_to_paste",
    ),
    Mutant(
        "columns of one domain are of every domain",
        "pipeline/commands/support/init_inputs.py",
        "for name in ([domain] if domain else domains)",
        "for name in domains",
        "tests/pipeline/test_init_data.py"
        "::test_two_files_with_different_columns_are_taken_by_one_call",
    ),
    Mutant(
        "the split train has the files of train_sft",
        "pipeline/new_run/data_sets.py",
        "(?!_?[A-Za-z])",
        "(?![A-Za-z])",
        "tests/pipeline/test_data_sets.py",
    ),
    Mutant(
        "a row of a later batch of Arrow is one of the first",
        "stages/data/arrow_rows.py",
        "batch.slice(at - int(ends[number]) + len(batch), 1)",
        "batch.slice(min(at, len(batch) - 1), 1)",
        "tests/stages/test_file_prompts.py::test_jsonl_parquet_and_arrow_agree_row_for_row",
    ),
    Mutant(
        "demonstrations lack the template of the prompts",
        "stages/kinds/mixture_stage.py",
        "template = template_of(settings.prompts)",
        "template = None",
        "tests/stages/test_prompt_template.py::test_a_cold_start_reads_the_template",
    ),
    Mutant(
        "a template is put around what a row has already",
        "stages/data/prompt_template.py",
        "if fits and text.startswith(before) and text.endswith(after):",
        "if False:",
        "tests/stages/test_prompt_template.py::test_what_a_row_has_already_is_not_added_again",
    ),
]
