"""One file per way to travel: each is made once per bucket, keeps its buffers, and `go`es once per step; see
`pipeline`."""
