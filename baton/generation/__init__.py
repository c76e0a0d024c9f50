"""Settings of generation: sampling parameters, schemas and grammars. Torch-free."""
