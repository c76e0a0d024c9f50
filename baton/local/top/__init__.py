"""`baton top`: routers asked again and again (`poll`), what changed (`view`), drawn (`frame`)."""
