"""Replicas on Ray Serve: engines as Serve replicas behind one API.

    cluster, llm, driver            the server's process: tokenizes, sends, answers clients
    images                          its part that reads images
    dispatch, request_router        choose a replica by prefix and load, inside Ray Serve
    replica                         an engine; answers requests, reports its cache
    heartbeat                       dead servers, silent replicas, feeds of reports

Ray starts, scales, checks, drains and replaces the replicas and carries all calls.
"""
