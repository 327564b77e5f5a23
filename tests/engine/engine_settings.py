"""The engine that the tests share, and its model."""

from parallel.settings import EngineSettings, ModelSettings

MODEL = ModelSettings(
    vocabulary_size=80,
    hidden_size=32,
    layers=2,
    attention_heads=4,
    key_value_heads=2,
    head_dim=32,
    experts=4,
    experts_per_token=2,
    expert_hidden_size=32,
)
ENGINE = EngineSettings(max_sequences=64)
