"""Replicas on Ray Serve: engines as Serve replicas behind one API.

    cluster, llm, driver            tokenize and route requests, in the server's process
    images                          reads images in the server's process
    dispatch, request_router        choose a replica by prefix and load, inside Ray Serve
    replica                         runs an engine, answers requests, reports its cache
    heartbeat                       detects dead servers and silent replicas, reads reports
    messages                        the messages between servers and replicas

Ray starts, scales, checks, drains and replaces the replicas and carries all calls.
"""
