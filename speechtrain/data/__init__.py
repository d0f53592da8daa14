"""Speech data: sources, an index over their cuts, a stateless sampler, batches."""
