"""Tools that a model may call: how it writes calls, what is offered, who approves, and the limits."""
