"""Chairlift: a language-model serving engine with a gatekeeper."""
