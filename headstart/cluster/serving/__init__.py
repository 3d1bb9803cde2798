"""Replicas on Ray Serve: engines as Serve replicas, one API in front of them.

    cluster, llm, front, driver     the server's process: tokenises, sends, tells the client
    images                          its part that reads images
    dispatch, request_router        choose a replica by prefix and load, inside Ray Serve
    replica, publisher              an engine; answers requests, tells what its cache holds

Ray starts, scales, checks, drains and replaces the replicas and carries all calls.
"""
