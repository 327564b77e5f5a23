"""Trackers of experiments: Weights & Biases, TensorBoard, trackio; each gets what a stage logs."""
