"""configs/clusters/example.yaml names every key of a profile, and each script how to submit it."""

from __future__ import annotations

from pathlib import Path

import yaml

from pipeline.config.cluster import ClusterSettings, KindSettings
from pipeline.config.validate import load_cluster
from pipeline.slurm.submit import SCRIPTS

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "configs" / "clusters" / "example.yaml"


def test_the_example_is_valid_and_names_every_key() -> None:
    load_cluster(EXAMPLE)
    assert set(yaml.safe_load(EXAMPLE.read_text())) == set(ClusterSettings.model_fields)


def test_a_kind_of_stages_has_no_key_of_its_own() -> None:
    assert KindSettings.model_fields.keys() < ClusterSettings.model_fields.keys()


def test_every_stage_script_says_how_to_submit_it_by_hand() -> None:
    scripts = sorted(SCRIPTS.glob("*.sbatch"))
    assert len(scripts) >= 5
    for script in scripts:
        assert f"sbatch [OPTIONS] slurm/{script.name} runs/NAME " in script.read_text()
