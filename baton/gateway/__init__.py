"""OpenAI's HTTP API over the same service as gRPC: `routes.frontend` is given to `router.main.run`.

    baton.net.http_server -> routes -> generation -> GenerationService
    -> output -> client

It knows HTTP and JSON, and nothing of workers; admission is the service's.
"""
