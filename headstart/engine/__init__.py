"""Token ids in, token ids out: scheduler, runner, sampler, driver."""
