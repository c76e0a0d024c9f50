"""How servers serve: whole programs, asked over HTTP, alone on the same cores one after another."""
