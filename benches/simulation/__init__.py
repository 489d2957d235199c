"""Experiments on scheduling policies, in the simulator: ``benches/policies.py`` runs them."""
