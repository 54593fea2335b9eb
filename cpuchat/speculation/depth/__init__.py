"""How many tokens to draft: acceptance, costs and the choice."""
