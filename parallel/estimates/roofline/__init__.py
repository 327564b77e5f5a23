"""The seconds of a step's phases on GPUs: a roofline with stated efficiencies. No torch."""
