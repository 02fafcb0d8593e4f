"""Whose a card's memory is: the ledger, the plan that makes room, its keeper, and a tenant's side of it."""
