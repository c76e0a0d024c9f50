"""gRPC stubs, generated from protos/ by scripts/protos.py when the package is built or installed."""

from pathlib import Path

if not Path(__file__).with_name("common_pb2.py").exists():
    raise ImportError(
        "baton/v1 has no gRPC stubs: run `make setup` in Baton's source tree "
        "(or `python scripts/protos.py` where grpcio-tools and hatchling are installed)"
    )
