# F3: the second step is longer, the receiver keeps the first step's shape
group pp = 0-1

r0:
  step GPipe n=1 { S F0->1 [f32 2x4] }
  step GPipe n=1 { S F0->1 [f32 2x6] }
r1:
  step GPipe n=1 { R F0<-0 [f32 2x4] }
  step GPipe n=1 { R F0<-0 [f32 2x4] }
