"""One prompt, two sides: a model and another one, or the same with other settings. Headless."""
