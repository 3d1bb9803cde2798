"""Requests in, tokens out: scheduler, runner, sampler, driver, and the API over them."""
