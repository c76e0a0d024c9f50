"""Model configurations and the decoder in plain torch, the reference."""
