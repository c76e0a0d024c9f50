"""What a request asks of generation: sampling parameters, schemas and grammars. Knows no tensor."""
