"""Doors for libraries of models: each module here has its library's name, and imports it."""
