"""The files of a model directory: config fields and safetensors."""
