"""Whether, when and at whose cost a request is let in."""
