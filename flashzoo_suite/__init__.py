"""The suite that `flashzoo check` runs on a version of anyone's: pytest's modules, made from what a `Spec` declares."""
