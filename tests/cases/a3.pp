# A3: PP 2 × DP 2: the first P2P stands between all-gathers issued in another order
group pp0 = 0,2
group pp1 = 1,3
group dp0 = 0-1
group dp1 = 2-3

r0: S metadata->2; all_gather dp0
r1: all_gather dp0; S metadata->3
r2: all_gather dp1; R metadata<-0
r3: R metadata<-1; all_gather dp1
