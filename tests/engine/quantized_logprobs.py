"""The log-probabilities of a prompt, by vLLM on a CPU, of a checkpoint on disk.

    python -m tests.engine.quantized_logprobs CHECKPOINT TOKEN ...

Prints them as JSON. Without Braid's engine, which is given its weights by a trainer.
"""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    checkpoint, *tokens = sys.argv[1:]
    engine = LLM(
        checkpoint,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
    )
    prompt = {"prompt_token_ids": [int(token) for token in tokens]}
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    [answer] = engine.generate(prompt, sampling, use_tqdm=False)
    found = [next(iter(each.values())).logprob for each in answer.prompt_logprobs[1:]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
