"""Operations in plain torch, the references of the kernels."""
