# B5: a hub's batch is three times as large as its leaves', all matched
world 4

r0:
  {S x0->1, S x1->1, S x2->1, S x3->1, S x4->1, S x5->1, S x0->2, S x1->2, S x2->2, S x3->2, S x4->2, S x5->2, S x0->3, S x1->3, S x2->3, S x3->3, S x4->3, S x5->3}
r1: {R x0<-0, R x1<-0, R x2<-0, R x3<-0, R x4<-0, R x5<-0}
r2: {R x0<-0, R x1<-0, R x2<-0, R x3<-0, R x4<-0, R x5<-0}
r3: {R x0<-0, R x1<-0, R x2<-0, R x3<-0, R x4<-0, R x5<-0}
